// SPDX-License-Identifier: Apache-2.0
#include "server/trace/tracer.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/base/mutex.h"

namespace precondor::trace {
namespace {

// How long shutdown keeps starting new requests, so that a slow collector delays it by one more request at most.
constexpr absl::Duration kLongestEnd = absl::Seconds(2);

thread_local Operation* t_current = nullptr;

}  // namespace

Tracer::Tracer(Options options, Resource resource, const Clock& clock, Logger& logger, Send send)
    : options_(options),
      resource_(std::move(resource)),
      clock_(clock),
      logger_(logger),
      send_(std::move(send)),
      thread_([this] { Run(); }) {}

Tracer::~Tracer() {
  {
    MutexLock lock(mu_);
    ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Tracer::Record(Span span) {
  if (span.status.message().size() > options_.text_bytes) {
    span.status = absl::Status(span.status.code(), span.status.message().substr(0, options_.text_bytes));
  }
  for (Attribute& attribute : span.attributes) {
    auto* text = std::get_if<std::string>(&attribute.value);
    if (text != nullptr && text->size() > options_.text_bytes) *text = text->substr(0, options_.text_bytes);
  }
  MutexLock lock(mu_);
  if (queue_.size() >= options_.queue_spans) {
    ++counts_.dropped;
    return;
  }
  queue_.push_back(std::move(span));
  if (queue_.size() == options_.batch_spans) changed_.notify_all();
}

Tracer::Counts Tracer::counts() const {
  MutexLock lock(mu_);
  return counts_;
}

void Tracer::Run() {
  NameThisThread("traces");
  std::optional<absl::Time> last_request;  // after this time no request starts; set at shutdown
  for (;;) {
    bool ending = false, more = false;
    {
      MutexLock lock(mu_);
      changed_.wait_for(mu_, absl::ToChronoNanoseconds(options_.pause), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return ending_ || queue_.size() >= options_.batch_spans;
      });
      ending = ending_;
      more = !queue_.empty();
      if (ending && !last_request.has_value()) last_request = clock_.Now() + kLongestEnd;
      if (ending && (failing_ || !more || clock_.Now() >= *last_request)) {
        counts_.dropped += static_cast<int64_t>(queue_.size());
        return;
      }
    }
    if (more) SendBatch();
  }
}

void Tracer::SendBatch() {
  std::vector<Span> batch;
  {
    MutexLock lock(mu_);
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(std::min(queue_.size(), options_.batch_spans));
    batch.assign(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
    queue_.erase(queue_.begin(), end);
  }
  const absl::Status sent = send_(EncodeOtlp(resource_, batch, clock_.Wall() - clock_.Now()));
  const auto spans = static_cast<int64_t>(batch.size());
  {
    MutexLock lock(mu_);
    failing_ = !sent.ok();
    (sent.ok() ? counts_.sent : counts_.dropped) += spans;
  }
  if (sent.ok()) return;
  logger_.Log(Severity::kWarning, "spans are dropped: the collector does not accept them",
              {{"spans", spans}, {"reason", absl::string_view(sent.message())}});
}

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
