// SPDX-License-Identifier: Apache-2.0
// What this thread works on: log lines and calls to other servers carry its trace.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/trace/span.h"
#include "server/trace/tracer.h"

namespace precondor::trace {

// The work of one call, or of a timer, on one thread from its construction to its end: then it is the thread's again
// that was before. Not thread-safe.
class Operation {
 public:
  // `parent`: what the caller sent; nullopt: nothing. `keep`: whether it becomes a span. Without `tracer` it never
  // does, and the trace of the caller goes on as it is.
  Operation(Tracer* tracer, std::string name, SpanKind kind, absl::Time start, std::optional<TraceContext> parent,
            bool keep);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // nullptr: this thread works on nothing that has a trace.
  static const TraceContext* CurrentTrace();
  // Adds to the span of what this thread works on.
  static void Annotate(std::string name, std::variant<std::string, int64_t, double> value);
  // What this thread works on is worth a span after all.
  static void Keep();

  void set_status(const absl::Status& status) { span_.status = status; }

 private:
  Tracer* const tracer_;
  Operation* const outer_;
  bool keep_;
  bool traced_;  // span_.context is set
  Span span_;
};

}  // namespace precondor::trace
