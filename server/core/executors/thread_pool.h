// SPDX-License-Identifier: Apache-2.0
// The executor of a server: a fixed number of threads that run strands, on their own stacks or on fibers.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"
#include "server/core/api/executor.h"
#include "server/core/executors/strand_queue.h"

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

// Keeps fibers for reuse. Not thread-safe: the executor guards it. Precondition of the destructor: all fibers have
// ended.
class FiberPool {
 public:
  // Returns a fiber whose function has ended, or null if the system has no memory for another stack. `home` is as in
  // Fiber::Make.
  Fiber* Take(FiberScheduler& home) {
    if (idle_.empty()) {
      std::unique_ptr<Fiber> made = Fiber::Make(home);
      if (made == nullptr) return nullptr;
      return fibers_.emplace_back(std::move(made)).get();
    }
    Fiber* const fiber = idle_.back();
    idle_.pop_back();
    return fiber;
  }
  void Return(Fiber& fiber) { idle_.push_back(&fiber); }

 private:
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

// Runs strands on a fixed number of threads. Ready strands take turns (StrandQueue). At most as many tasks of one
// session run at once as there are threads. If a session has work and no thread, because tasks of other sessions have
// all of them, a helper thread serves it, so that the system shares the processors among the sessions. Tasks in the
// background run on as many threads again, of a lower priority, which are created for the first of these tasks.
// Thread-safe. The destructor runs all posted tasks and joins; while it runs, only the tasks themselves may post.
//
// With fibers (`tasks_on_fibers` > 0) that many tasks run at once, whatever the number of threads, and no helper thread
// is needed: a task that waits for a device's driver (kernels/grouping/device_driver.h) leaves its thread to other
// strands, and continues on any thread.
class ThreadPoolExecutor final : public Executor, private FiberScheduler {
 public:
  // Starts max(1, threads) threads with this name, of up to 15 characters, which outlives the executor.
  explicit ThreadPoolExecutor(int threads, int tasks_on_fibers = 0, const char* name = "compute");
  ~ThreadPoolExecutor() override;
  ThreadPoolExecutor(const ThreadPoolExecutor&) = delete;
  ThreadPoolExecutor& operator=(const ThreadPoolExecutor&) = delete;

  uint64_t NewStrand() override { return NewStrandOf(0, tasks_at_once_); }
  uint64_t NewStrandOf(uint64_t session, int at_once) override;
  void Post(uint64_t strand, Task task) override;
  void PostBackground(Task task) override { background_.Post(std::move(task)); }
  // Wakes a thread if a posted task needs one. For TaskBatch.
  void WakeForPosted();
  // Waits until no task of a strand is queued or running, which is more than the interface asks for. Not to be called
  // from a task.
  void Drain() override;
  int parallelism() const override { return tasks_at_once_; }

 private:
  // Queues a fiber that has left a device's driver, so that a thread continues it.
  void Resume(Fiber& fiber) override;
  void Work();
  // Main loop of a helper thread, which serves sessions that have no thread.
  void HelperLoop();
  // Wakes or starts a helper thread if a session has no thread and no thread is free.
  void WakeHelper() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns true if the caller is to wake a free thread: there is work, and no thread that was woken is on its way. The
  // thread that takes a task wakes the next one, so that tasks that are posted together do not cost a wake-up each.
  bool ShouldWake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Runs a task on this thread's stack.
  void Run(StrandQueue::Next next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Notes that a task of the strand has run.
  void Finish(uint64_t strand) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartOnFiber(Fiber* fiber, uint64_t strand, Task task) ABSL_LOCKS_EXCLUDED(mu_);
  void Continue(Fiber& fiber) ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  CondVar ready_changed_;
  CondVar idle_;
  CondVar help_wanted_;
  StrandQueue strands_ ABSL_GUARDED_BY(mu_);
  int free_threads_ ABSL_GUARDED_BY(mu_) = 0;  // those of threads_ that wait for work
  bool waking_ ABSL_GUARDED_BY(mu_) = false;   // one of them has been woken and does not run yet
  int free_helpers_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::thread> helpers_ ABSL_GUARDED_BY(mu_);  // started when they are first needed
  std::deque<Fiber*> resumed_ ABSL_GUARDED_BY(mu_);
  FiberPool fibers_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  // Const after construction.
  const char* const name_;
  const bool on_fibers_;
  const int tasks_at_once_;
  BackgroundThreads background_;
  std::vector<std::thread> threads_;
};

// While it exists, a task that this thread posts to a ThreadPoolExecutor does not wake a thread at once. A thread is
// woken for each eighth task, and at the end. A small task takes less time than a wake-up: a thread that is woken for
// each task sleeps again before the next one. Lives on the stack of a thread that runs no fiber, one at a time.
class TaskBatch {
 public:
  TaskBatch();
  ~TaskBatch();
  TaskBatch(const TaskBatch&) = delete;
  TaskBatch& operator=(const TaskBatch&) = delete;

  // For `executor`: returns true if the wake-up for the task that this thread has posted is deferred.
  static bool Defers(ThreadPoolExecutor& executor);

 private:
  ThreadPoolExecutor* executor_ = nullptr;  // the one whose wake-ups are deferred
  int tasks_ = 0;                           // that it was given
};

}  // namespace precondor
