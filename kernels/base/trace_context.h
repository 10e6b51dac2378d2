// SPDX-License-Identifier: Apache-2.0
// The trace that a call belongs to, in the format of W3C Trace Context: the header "traceparent", which gRPC metadata
// carries under that name. Clients send one with each call and stream; server/trace makes spans from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace precondor {

inline constexpr char kTraceparentKey[] = "traceparent";

struct TraceContext {
  std::string trace_id;  // 32 lower-case hexadecimal digits, not all zero
  std::string span_id;   // 16 lower-case hexadecimal digits, not all zero
  bool sampled = false;  // the sender records its spans of this trace
  friend bool operator==(const TraceContext&, const TraceContext&) = default;
};

// Returns nullopt unless `header` has version 00, or a later version whose header begins like one of version 00.
std::optional<TraceContext> ParseTraceparent(absl::string_view header);
std::string FormatTraceparent(const TraceContext& context);

// Returns a random trace that is not sampled. Thread-safe.
TraceContext NewTrace();
std::string NewSpanId();

// Returns the trace of one step of a session, with the span that stands for the whole step; not sampled. All ranks and
// shards compute equal values, so they need not exchange them.
TraceContext TraceOfStep(uint64_t session_id, uint64_t step);

// Returns whether the trace belongs to the sampled share, 0 ... 1, of all traces. All processes with one share decide
// alike. The last 56 bits of the id decide, as in OpenTelemetry's TraceIdRatioBased sampler.
bool InShare(const TraceContext& context, double share);

}  // namespace precondor
