// SPDX-License-Identifier: Apache-2.0
// Encodes spans as OTLP/HTTP JSON, version 1, which a collector accepts at /v1/traces.
#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"

#include "server/trace/span.h"

namespace precondor::trace {

inline constexpr char kOtlpPath[] = "/v1/traces";

// The server that the spans are from.
struct Resource {
  std::string version;
  std::string role;
  std::string instance;  // an address of the server
};

// Returns an ExportTraceServiceRequest. `wall_offset` is what to add to a time of MonotonicNow to get the wall clock's
// time.
std::string EncodeOtlp(const Resource& resource, const std::vector<Span>& spans, absl::Duration wall_offset);

}  // namespace precondor::trace
