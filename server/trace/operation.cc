// SPDX-License-Identifier: Apache-2.0
#include "server/trace/operation.h"

namespace precondor::trace {
namespace {

thread_local Operation* t_current = nullptr;

}  // namespace

Operation::Operation(Tracer* tracer, std::string name, SpanKind kind, absl::Time start,
                     std::optional<TraceContext> parent, bool keep)
    : tracer_(tracer), outer_(t_current), keep_(keep), traced_(tracer != nullptr || parent.has_value()) {
  t_current = this;
  if (!traced_) return;
  span_.context = parent.has_value() ? *parent : NewTrace();
  if (tracer_ == nullptr) return;
  if (parent.has_value()) {
    span_.parent_span_id = parent->span_id;
    span_.context.span_id = NewSpanId();
  }
  // If this span is kept, servers that this operation calls keep theirs.
  span_.context.sampled = keep || span_.context.sampled;
  span_.name = std::move(name);
  span_.kind = kind;
  span_.start = start;
}

Operation::~Operation() {
  t_current = outer_;
  if (tracer_ == nullptr || !keep_) return;
  span_.end = tracer_->Now();
  tracer_->Record(std::move(span_));
}

const TraceContext* Operation::CurrentTrace() {
  return t_current != nullptr && t_current->traced_ ? &t_current->span_.context : nullptr;
}

void Operation::Annotate(std::string name, std::variant<std::string, int64_t, double> value) {
  if (t_current == nullptr || t_current->tracer_ == nullptr || !t_current->keep_) return;
  t_current->span_.attributes.push_back({std::move(name), std::move(value)});
}

void Operation::Keep() {
  if (t_current == nullptr || t_current->tracer_ == nullptr) return;
  t_current->keep_ = true;
  t_current->span_.context.sampled = true;
}

}  // namespace precondor::trace
