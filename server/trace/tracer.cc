// SPDX-License-Identifier: Apache-2.0
#include "server/trace/tracer.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace precondor::trace {

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
  for (;;) {
    bool ending = false, more = false;
    {
      MutexLock lock(mu_);
      changed_.wait_for(mu_, absl::ToChronoNanoseconds(options_.pause), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return ending_ || queue_.size() >= options_.batch_spans;
      });
      ending = ending_;
      more = !queue_.empty();
    }
    if (more) SendBatch();
    if (!ending) continue;
    MutexLock lock(mu_);
    if (failing_) counts_.dropped += static_cast<int64_t>(queue_.size());
    if (failing_ || queue_.empty()) return;
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
  logger_.Log(Severity::kWarning, "spans are dropped: the collector does not take them",
              {{"spans", spans}, {"reason", absl::string_view(sent.message())}});
}

}  // namespace precondor::trace
