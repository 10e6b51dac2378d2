// SPDX-License-Identifier: Apache-2.0
#include "server/core/executors/background_threads.h"

#include <unistd.h>
#include <utility>

#include "kernels/base/mutex.h"

namespace precondor {
namespace {

constexpr int kNiceness = 10;  // about a tenth of a core that strands also want

}  // namespace

void BackgroundThreads::Post(Executor::Task task) {
  {
    MutexLock lock(mu_);
    while (static_cast<int>(threads_.size()) < count_) threads_.emplace_back([this] { Work(); });
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void BackgroundThreads::Stop() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    threads.swap(threads_);
  }
  changed_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void BackgroundThreads::Work() {
  NameThisThread("background");
  // On Linux this changes the niceness of this thread alone.
  (void)!nice(kNiceness);
  MutexLock lock(mu_);
  for (;;) {
    while (tasks_.empty() && !stopping_) changed_.wait(mu_);
    if (tasks_.empty()) return;
    Executor::Task task = std::move(tasks_.front());
    tasks_.pop_front();
    mu_.Unlock();
    task();
    task = nullptr;  // releases the objects that the task holds without the lock
    mu_.Lock();
  }
}

}  // namespace precondor
