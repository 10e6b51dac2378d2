// SPDX-License-Identifier: Apache-2.0
// Spans as the JSON of OTLP/HTTP, version 1: what a collector takes at /v1/traces.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"

#include "server/trace/span.h"

namespace precondor::trace {

inline constexpr char kOtlpPath[] = "/v1/traces";

// Who the spans are from.
struct Resource {
  std::string version;
  std::string role;
  std::string instance;  // an address of the server
};

// An ExportTraceServiceRequest. `wall_offset` turns a time of MonotonicNow into one of the wall clock.
std::string EncodeOtlp(const Resource& resource, const std::vector<Span>& spans, absl::Duration wall_offset);

}  // namespace precondor::trace
