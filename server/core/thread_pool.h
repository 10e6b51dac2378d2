// SPDX-License-Identifier: Apache-2.0
// The executor of a server: a fixed number of threads that run strands, on their own stacks or on fibers.
#pragma once

#include <cstdint>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"
#include "server/core/background_threads.h"
#include "server/core/executor.h"
#include "server/core/fiber_pool.h"
#include "server/core/strand_queue.h"

namespace precondor {

// Thread-safe. Ready strands take turns (StrandQueue). A session that has work and no thread, because others' tasks
// have all of them, gets one more, so that the system shares the processors among the sessions; at most so many tasks
// of a session run at once as there are threads otherwise. The destructor runs what was posted and joins; nothing may
// be posted while it runs, but by the tasks themselves. As many threads again, of a lower priority, are made for the
// first task in the background.
//
// With fibers (`tasks_on_fibers` > 0) so many strands run at once, whatever the number of threads: a task that waits
// for a device's driver (kernels/grouping/device_driver.h) leaves its thread to other strands, and goes on on any
// thread.
class ThreadPoolExecutor final : public Executor, private FiberScheduler {
 public:
  // At least one thread is made.
  explicit ThreadPoolExecutor(int threads, int tasks_on_fibers = 0);
  ~ThreadPoolExecutor() override;
  ThreadPoolExecutor(const ThreadPoolExecutor&) = delete;
  ThreadPoolExecutor& operator=(const ThreadPoolExecutor&) = delete;

  uint64_t NewStrand() override { return NewStrandOf(0); }
  uint64_t NewStrandOf(uint64_t session) override;
  void Post(uint64_t strand, Task task) override;
  void PostBackground(Task task) override { background_.Post(std::move(task)); }
  // Waits until nothing of a strand is queued or running, which is more than the interface asks for. Not from a task.
  void Drain() override;
  int parallelism() const override { return tasks_at_once_; }

 private:
  // Puts a fiber that has left a driver back to work.
  void Resume(Fiber& fiber) override;
  void Work();
  // Of a thread for sessions that have none.
  void WorkForIdle();
  // Has one more thread work, where a session has none and no thread is free.
  void HelpIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Runs a task on this thread's stack.
  void Run(StrandQueue::Next next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A task of the strand has run.
  void Finish(uint64_t strand) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartOnFiber(Fiber* fiber, uint64_t strand, Task task) ABSL_LOCKS_EXCLUDED(mu_);
  void Continue(Fiber& fiber) ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  CondVar ready_changed_;
  CondVar idle_;
  CondVar help_wanted_;
  StrandQueue strands_ ABSL_GUARDED_BY(mu_);
  int free_threads_ ABSL_GUARDED_BY(mu_) = 0;  // of threads_, that wait for work
  int free_helpers_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> helpers_ ABSL_GUARDED_BY(mu_);  // made when they are first wanted
  std::deque<Fiber*> resumed_ ABSL_GUARDED_BY(mu_);
  FiberPool fibers_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  // Const after construction.
  const bool on_fibers_;
  const int tasks_at_once_;
  BackgroundThreads background_;
  std::vector<std::thread> threads_;
};

}  // namespace precondor
