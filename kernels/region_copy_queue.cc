// SPDX-License-Identifier: Apache-2.0
#include "kernels/region_copy_queue.h"

#include <utility>

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"

namespace precondor {

RegionCopyQueue::~RegionCopyQueue() {
  std::thread ending;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_one();
    ending = std::move(thread_);
  }
  if (ending.joinable()) ending.join();
}

void RegionCopyQueue::Post(RegionCopy copy, size_t outstanding, Done done) {
  MutexLock lock(mu_);
  outstanding_ = outstanding;
  copies_.push_back(copy);
  done_.push_back(std::move(done));
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  changed_.notify_one();
}

void RegionCopyQueue::Loop() {
  NameThisThread("region-copies");
  for (;;) {
    std::vector<RegionCopy> copies;
    std::vector<Done> done;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !copies_.empty(); });
      changed_.wait_until(mu_, SteadyTime(MonotonicNow() + patience_), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopping_ || copies_.size() >= outstanding_;
      });
      copies.swap(copies_);
      done.swap(done_);
    }
    if (copies.empty()) return;
    const absl::Status status = memory_.Copy(copies);
    for (Done& each : done) std::exchange(each, nullptr)(status);
  }
}

}  // namespace precondor
