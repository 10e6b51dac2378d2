// SPDX-License-Identifier: Apache-2.0
// Decides which traces are kept, and sends their spans to a collector.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/trace/span.h"

namespace precondor::trace {

// Queues spans and sends them in batches on a thread of its own. Record never waits for the collector: spans that do
// not fit into the queue, or cannot be sent, are dropped and counted. Thread-safe.
class Tracer {
 public:
  struct Options {
    double step_share = 0;                    // share of the steps whose traces are kept, 0 ... 1
    size_t queue_spans = 4096;                // most spans in the queue
    size_t batch_spans = 256;                 // most spans in one request
    size_t text_bytes = 256;                  // longer texts of statuses and attributes are cut: callers choose names
    absl::Duration pause = absl::Seconds(1);  // longest wait for a batch to fill
  };
  // Sends the body of one request to the collector. Called on the tracer's thread; must return within seconds.
  using Send = std::function<absl::Status(const std::string& body)>;

  // Lifetime: `clock` and `logger` outlive the tracer.
  Tracer(Options options, Resource resource, const Clock& clock, Logger& logger, Send send);
  // Sends the queued spans until a request fails or two seconds have passed, drops the others, and ends the thread.
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // Returns whether spans of this trace are kept: the sender keeps its own spans, or the trace is in the share.
  bool Keeps(const TraceContext& context) const { return context.sampled || InShare(context, options_.step_share); }
  void Record(Span span);
  absl::Time Now() const { return clock_.Now(); }

  struct Counts {
    int64_t sent = 0;
    int64_t dropped = 0;
  };
  Counts counts() const;

 private:
  void Run();
  void SendBatch();

  const Options options_;
  const Resource resource_;
  const Clock& clock_;
  Logger& logger_;
  const Send send_;

  mutable Mutex mu_;
  CondVar changed_;
  std::deque<Span> queue_ ABSL_GUARDED_BY(mu_);
  Counts counts_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  bool failing_ ABSL_GUARDED_BY(mu_) = false;  // the last request failed
  std::thread thread_;
};

// The operation that the current thread executes: log lines and calls to other servers carry its trace. It is the work
// of one call or timer. It is the current operation of its thread from construction to destruction; then the
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
