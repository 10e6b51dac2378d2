// SPDX-License-Identifier: Apache-2.0
// Threads of a lower priority for work that no thread waits for yet.
#pragma once

#include <deque>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"
#include "server/core/api/executor.h"

namespace precondor {

// Runs tasks on threads of a lower priority, which are created for the first task. Thread-safe; mu_ is a leaf. The
// destructor runs all posted tasks and joins the threads.
class BackgroundThreads {
 public:
  explicit BackgroundThreads(int threads) : count_(threads) {}
  ~BackgroundThreads() { Stop(); }
  BackgroundThreads(const BackgroundThreads&) = delete;
  BackgroundThreads& operator=(const BackgroundThreads&) = delete;

  void Post(Executor::Task task);
  // Runs all posted tasks and joins the threads. Precondition: no task is posted afterwards.
  void Stop();

 private:
  void Work();

  const int count_;

  Mutex mu_;
  CondVar changed_;
  std::deque<Executor::Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
