// SPDX-License-Identifier: Apache-2.0
#include "server/app/periodic.h"

#include <utility>

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"

namespace precondor {

void PeriodicTimers::Start(const std::string& name, absl::Duration pause, std::function<void()> work) {
  {
    MutexLock lock(mu_);
    if (stop_) return;
  }
  threads_.emplace_back([this, name, pause, work = std::move(work)] {
    NameThisThread(name.c_str());
    Run(pause, work);
  });
}

void PeriodicTimers::Run(absl::Duration pause, const std::function<void()>& work) {
  for (;;) {
    work();
    MutexLock lock(mu_);
    stop_requested_.wait_until(mu_, SteadyTime(MonotonicNow() + pause),
                               [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stop_; });
    if (stop_) return;
  }
}

void PeriodicTimers::StopAll() {
  {
    MutexLock lock(mu_);
    stop_ = true;
  }
  stop_requested_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace precondor
