// SPDX-License-Identifier: Apache-2.0
#include "server/periodic.h"

#include <utility>

#include "kernels/base/clock.h"

namespace precondor {

void Periodic::Start(absl::Duration pause, std::function<void()> work) {
  thread_ = std::thread([this, pause, work = std::move(work)] { Run(pause, work); });
}

void Periodic::Run(absl::Duration pause, const std::function<void()>& work) {
  for (;;) {
    work();
    MutexLock lock(mu_);
    stop_requested_.wait_until(mu_, SteadyTime(MonotonicNow() + pause),
                               [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_; });
    if (stop_) return;
  }
}

void Periodic::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mu_);
    stop_ = true;
  }
  stop_requested_.notify_all();
  thread_.join();
}

}  // namespace precondor
