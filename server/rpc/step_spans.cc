// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/step_spans.h"

#include "absl/strings/str_cat.h"

namespace precondor::rpc {
namespace {

// Frames of two consecutive steps can interleave, because a client can send statistics later than gradients.
constexpr size_t kMostOpen = 2;

}  // namespace

StepSpan::StepSpan(trace::Tracer& tracer, const TraceContext& step, const TraceContext& stream,
                   const v1::FrameHeader& header)
    : tracer_(tracer) {
  const absl::Time now = tracer_.Now();
  MutexLock lock(mu_);
  span_ = {.context = {step.trace_id, NewSpanId(), true},
           .parent_span_id = step.span_id,
           .name = "exchange of a step",
           .kind = trace::SpanKind::kServer,
           .start = now,
           .end = now};
  span_.attributes = {{"precondor.session_id", absl::StrCat(header.session_id())},
                      {"precondor.step", static_cast<int64_t>(header.step())},
                      {"precondor.rank", int64_t{header.rank()}}};
  span_.link = stream;
}

StepSpan::~StepSpan() {
  MutexLock lock(mu_);
  const auto add = [this](const char* name, auto value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    span_.attributes.push_back({name, value});
  };
  add("precondor.contributions", contributions_);
  add("precondor.received_bytes", received_bytes_);
  add("precondor.answers", answers_);
  add("precondor.answer_bytes", answer_bytes_);
  add("precondor.update_seconds", absl::ToDoubleSeconds(took_.update));
  add("precondor.precondition_seconds", absl::ToDoubleSeconds(took_.precondition));
  if (acknowledged_.has_value()) span_.events.push_back({"last contribution acknowledged", *acknowledged_});
  if (answered_.has_value()) {
    span_.events.push_back({"first answer", *answered_});
    span_.events.push_back({"last answer", span_.end});
  }
  tracer_.Record(std::move(span_));
}

void StepSpan::OnAcknowledged(int64_t bytes) {
  const absl::Time now = tracer_.Now();
  MutexLock lock(mu_);
  ++contributions_;
  received_bytes_ += bytes;
  acknowledged_ = now;
  // After the first answer, only answers set the end of the span.
  if (!answered_.has_value()) span_.end = now;
}

void StepSpan::OnAnswer(const absl::StatusOr<GradientResult>& answer) {
  const absl::Time now = tracer_.Now();
  MutexLock lock(mu_);
  span_.end = now;
  if (!answered_.has_value()) answered_ = now;
  ++answers_;
  span_.status.Update(answer.status());
  if (!answer.ok()) return;
  answer_bytes_ += answer->payload_bytes();
  took_.update += answer->took.update;
  took_.precondition += answer->took.precondition;
}

std::shared_ptr<StepSpan> StepSpans::Of(const v1::FrameHeader& header) {
  const Key key(header.session_id(), header.step());
  if (last_ == key) return last_span_;
  last_ = key;
  if (const auto found = open_.find(key); found != open_.end()) return last_span_ = found->second;
  const TraceContext step = TraceOfStep(header.session_id(), header.step());
  last_span_ = tracer_.Keeps(step) ? std::make_shared<StepSpan>(tracer_, step, stream_, header) : nullptr;
  // Stores null for a step that is not traced, so that it also displaces the spans of earlier steps.
  open_[key] = last_span_;
  if (open_.size() > kMostOpen) open_.erase(open_.begin());
  return last_span_;
}

}  // namespace precondor::rpc
