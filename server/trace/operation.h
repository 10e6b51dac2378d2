// SPDX-License-Identifier: Apache-2.0
// The operation that the current thread executes: log lines and calls to other servers carry its trace.
#pragma once

#include <optional>
#include <string>

#include "server/trace/span.h"
#include "server/trace/tracer.h"

namespace precondor::trace {

// The work of one call or timer. It is the current operation of its thread from construction to destruction; then the
// previous one is current again. Not thread-safe.
class Operation {
 public:
  // `parent` is the caller's trace context, if any. `keep` says whether the operation is recorded as a span. A null
  // `tracer` records nothing, and the caller's trace context is passed on unchanged.
  Operation(Tracer* tracer, std::string name, SpanKind kind, absl::Time start, std::optional<TraceContext> parent,
            bool keep);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Returns the trace of the current operation, or nullptr if there is no operation or it has no trace.
  static const TraceContext* CurrentTrace();
  // Adds an attribute to the span of the current operation, if it is kept.
  static void Annotate(std::string name, std::variant<std::string, int64_t, double> value);
  // Records the current operation as a span although the constructor's `keep` was false.
  static void Keep();

  void set_status(const absl::Status& status) { span_.status = status; }

 private:
  Tracer* const tracer_;
  Operation* const outer_;  // the thread's previous operation; may be null
  bool keep_;
  bool traced_;  // whether span_.context is set
  Span span_;
};

}  // namespace precondor::trace
