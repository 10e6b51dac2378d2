// SPDX-License-Identifier: Apache-2.0
// Traces the steps of an Exchange stream: one span for each traced step, with what a rank and a shard exchange in it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"
#include "server/core/api/contribution.h"
#include "server/trace/tracer.h"

namespace precondor::rpc {

// The span of one step on one stream. The destructor records it: its owners release it when the stream has moved past
// the step and all answers are given. Thread-safe.
class StepSpan {
 public:
  // `step` is the span of the whole step and becomes the parent; `stream` is the span of the stream and becomes the
  // link. Lifetime: `tracer` outlives this object.
  StepSpan(trace::Tracer& tracer, const TraceContext& step, const TraceContext& stream, const v1::FrameHeader& header);
  ~StepSpan();
  StepSpan(const StepSpan&) = delete;
  StepSpan& operator=(const StepSpan&) = delete;

  // Counts a contribution of `bytes` that was acknowledged or refused.
  void OnAcknowledged(int64_t bytes);
  // Counts an answer. An error becomes the status of the span.
  void OnAnswer(const absl::StatusOr<GradientResult>& answer);

 private:
  trace::Tracer& tracer_;
  Mutex mu_;
  trace::Span span_ ABSL_GUARDED_BY(mu_);
  int64_t contributions_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t received_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t answers_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t answer_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  StageTimes took_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> acknowledged_ ABSL_GUARDED_BY(mu_);  // time of the last acknowledgement
  std::optional<absl::Time> answered_ ABSL_GUARDED_BY(mu_);      // time of the first answer
};

// Finds or begins the StepSpan of each frame of one stream. Threads: only the thread that reads the stream uses it.
class StepSpans {
 public:
  StepSpans(trace::Tracer& tracer, TraceContext stream) : tracer_(tracer), stream_(std::move(stream)) {}
  // Returns the span of the contribution's step, or null if the step is not traced.
  std::shared_ptr<StepSpan> Of(const v1::FrameHeader& header);

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // session, step
  trace::Tracer& tracer_;
  const TraceContext stream_;
  std::optional<Key> last_;                        // key of the last call of Of
  std::shared_ptr<StepSpan> last_span_;            // what that call returned
  std::map<Key, std::shared_ptr<StepSpan>> open_;  // at most kMostOpen
};

}  // namespace precondor::rpc
