// SPDX-License-Identifier: Apache-2.0
// Which trace a call belongs to, as W3C Trace Context has it: the header "traceparent", in gRPC metadata under the same
// name. Clients send one with each call and stream; server/trace makes spans of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace precondor {

inline constexpr char kTraceparentKey[] = "traceparent";

struct TraceContext {
  std::string trace_id;  // 32 lower-case hexadecimal digits, not all zero
  std::string span_id;   // 16 of them, not all zero
  bool sampled = false;  // the sender keeps its spans of this trace
  friend bool operator==(const TraceContext&, const TraceContext&) = default;
};

// nullopt: `header` is not one of version 00, or of a later version that begins like it.
std::optional<TraceContext> ParseTraceparent(absl::string_view header);
std::string FormatTraceparent(const TraceContext& context);

// A random trace, not sampled. Thread-safe.
TraceContext NewTrace();
std::string NewSpanId();

// The trace of one step of a session, and the span that stands for the whole step in it. All ranks and shards
// compute it alike, and need not tell each other of it. Not sampled.
TraceContext TraceOfStep(uint64_t session_id, uint64_t step);

// Whether the trace is in the share 0 ... 1 of all traces; the same on all processes that have the same share. The last
// 56 bits of the id decide, as in OpenTelemetry's TraceIdRatioBased sampler.
bool InShare(const TraceContext& context, double share);

}  // namespace precondor
