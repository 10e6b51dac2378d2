// SPDX-License-Identifier: Apache-2.0
// One span: a stretch of work that belongs to a trace (docs/monitoring.md, "Traces").
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

// The numbers of OTLP.
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
  std::optional<TraceContext> link = {};  // another span that has to do with this one
};

}  // namespace precondor::trace
