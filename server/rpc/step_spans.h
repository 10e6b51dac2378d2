// SPDX-License-Identifier: Apache-2.0
// One span for what a rank and a shard exchange in one step over one stream, of the steps that are traced.
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
#include "server/core/contribution.h"
#include "server/trace/tracer.h"

namespace precondor::rpc {

// It is recorded when nothing holds it any more: the stream is past the step, and all its answers are given.
// Thread-safe.
class StepSpan {
 public:
  // `stream`: the span of the stream. `tracer` outlives this.
  StepSpan(trace::Tracer& tracer, const TraceContext& step, const TraceContext& stream, const v1::FrameHeader& header);
  ~StepSpan();
  StepSpan(const StepSpan&) = delete;
  StepSpan& operator=(const StepSpan&) = delete;

  void OnAcknowledged(int64_t bytes);
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
  std::optional<absl::Time> acknowledged_ ABSL_GUARDED_BY(mu_);  // the last contribution
  std::optional<absl::Time> answered_ ABSL_GUARDED_BY(mu_);      // the first answer
};

// Those of one stream. Used by one thread at a time, that which reads the stream.
class StepSpans {
 public:
  StepSpans(trace::Tracer& tracer, TraceContext stream) : tracer_(tracer), stream_(std::move(stream)) {}
  // The span of a contribution's step; null: the step is not traced.
  std::shared_ptr<StepSpan> Of(const v1::FrameHeader& header);

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // session, step
  trace::Tracer& tracer_;
  const TraceContext stream_;
  std::optional<Key> last_;  // that was asked for
  std::shared_ptr<StepSpan> last_span_;
  std::map<Key, std::shared_ptr<StepSpan>> open_;  // at most kMostOpen
};

}  // namespace precondor::rpc
