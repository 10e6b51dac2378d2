// SPDX-License-Identifier: Apache-2.0
// Which traces are kept, and the queue from the threads that make spans to the one that sends them to a collector.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/trace/otlp.h"
#include "server/trace/span.h"

namespace precondor::trace {

// Thread-safe. Record never waits for the collector: what does not fit into the queue, or cannot be sent, is dropped
// and counted.
class Tracer {
 public:
  struct Options {
    double step_share = 0;                    // of all steps, 0 ... 1
    size_t queue_spans = 4096;                // most that wait
    size_t batch_spans = 256;                 // most in one request
    size_t text_bytes = 256;                  // of a status or an attribute: a caller can send names of megabytes
    absl::Duration pause = absl::Seconds(1);  // longest wait for a batch to fill
  };
  // Sends one request's body to the collector; on the tracer's thread. It returns within seconds.
  using Send = std::function<absl::Status(const std::string& body)>;

  // `clock` and `logger` outlive the tracer.
  Tracer(Options options, Resource resource, const Clock& clock, Logger& logger, Send send);
  // Sends what waits, until a request fails or two seconds have passed, and ends.
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // Whether spans of this trace are kept: its sender keeps its own, or it is in the share.
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
  bool failing_ ABSL_GUARDED_BY(mu_) = false;  // the last request was not taken
  std::thread thread_;
};

}  // namespace precondor::trace
