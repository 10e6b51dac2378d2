// SPDX-License-Identifier: Apache-2.0
// One span: a unit of work that belongs to a trace (docs/operate/monitoring.md, "Traces").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/trace_context.h"

namespace precondor::trace {

struct Attribute {
  std::string name;
  std::variant<std::string, int64_t, double> value;
};

struct Event {
  std::string name;
  absl::Time at;
};

// The values are OTLP's.
enum class SpanKind : uint8_t { kInternal = 1, kServer = 2 };

// Times are those of MonotonicNow.
struct Span {
  TraceContext context;
  std::string parent_span_id = {};  // empty: the root of its trace
  std::string name = {};
  SpanKind kind = SpanKind::kInternal;
  absl::Time start = {};
  absl::Time end = {};
  absl::Status status = {};
  std::vector<Attribute> attributes = {};
  std::vector<Event> events = {};
  std::optional<TraceContext> link = {};  // a related span that is not the parent
};

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
