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

}  // namespace precondor::trace
