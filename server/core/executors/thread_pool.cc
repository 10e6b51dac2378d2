// SPDX-License-Identifier: Apache-2.0
#include "server/core/executors/thread_pool.h"

#include <algorithm>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "kernels/base/mutex.h"

namespace precondor {
namespace {

constexpr int kNiceness = 10;  // about a tenth of a core that strands also want

// Maximum number of helper threads. So many sessions more than threads can have work without waiting for each other's.
constexpr size_t kMostHelpers = 16;

constexpr int kTasksPerWake = 8;  // of a TaskBatch

thread_local TaskBatch* t_batch = nullptr;

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

TaskBatch::TaskBatch() { t_batch = this; }

TaskBatch::~TaskBatch() {
  t_batch = nullptr;
  if (executor_ != nullptr) executor_->WakeForPosted();
}

bool TaskBatch::Defers(ThreadPoolExecutor& executor) {
  TaskBatch* const batch = t_batch;
  if (batch == nullptr) return false;
  if (batch->executor_ == nullptr) batch->executor_ = &executor;
  // Layers of another device have another executor, which is woken at once.
  return batch->executor_ == &executor && ++batch->tasks_ % kTasksPerWake != 0;
}

ThreadPoolExecutor::ThreadPoolExecutor(int threads, int tasks_on_fibers, const char* name)
    : strands_(tasks_on_fibers > 0 ? tasks_on_fibers : std::max(1, threads)),
      name_(name),
      on_fibers_(tasks_on_fibers > 0),
      tasks_at_once_(on_fibers_ ? tasks_on_fibers : std::max(1, threads)),
      background_(std::max(1, threads)) {
  const int count = std::max(1, threads);
  threads_.reserve(count);
  for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Work(); });
}

ThreadPoolExecutor::~ThreadPoolExecutor() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  ready_changed_.notify_all();
  help_wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  std::vector<std::thread> helpers;
  {
    MutexLock lock(mu_);
    helpers.swap(helpers_);
  }
  for (std::thread& helper : helpers) helper.join();
  // No thread posts from here on.
  background_.Stop();
}

uint64_t ThreadPoolExecutor::NewStrandOf(uint64_t session, int at_once) {
  MutexLock lock(mu_);
  return strands_.NewStrand(session, at_once);
}

void ThreadPoolExecutor::Post(uint64_t strand, Task task) {
  bool wake = false;
  {
    MutexLock lock(mu_);
    if (!strands_.Push(strand, std::move(task))) return;
    WakeHelper();
    if (TaskBatch::Defers(*this)) return;
    wake = ShouldWake();
  }
  if (wake) ready_changed_.notify_one();
}

void ThreadPoolExecutor::WakeForPosted() {
  bool wake = false;
  {
    MutexLock lock(mu_);
    wake = ShouldWake();
  }
  if (wake) ready_changed_.notify_one();
}

bool ThreadPoolExecutor::ShouldWake() {
  if (waking_ || free_threads_ == 0 || !HasWork()) return false;
  waking_ = true;
  return true;
}

void ThreadPoolExecutor::WakeHelper() {
  // A task on a fiber leaves its thread while it waits. A free thread takes the next task.
  if (on_fibers_ || free_threads_ > 0 || !strands_.has_next_of_idle()) return;
  if (free_helpers_ > 0) return help_wanted_.notify_one();
  if (stopping_ || helpers_.size() >= kMostHelpers) return;
  try {
    helpers_.emplace_back([this] { HelperLoop(); });
    ++free_helpers_;
  } catch (const std::system_error&) {  // no memory for a thread: the session waits for its turn
  }
}

void ThreadPoolExecutor::Drain() {
  MutexLock lock(mu_);
  while (!strands_.empty()) idle_.wait(mu_);
}

bool ThreadPoolExecutor::HasWork() const {
  return !resumed_.empty() || (strands_.has_next() && (!on_fibers_ || strands_.running() < tasks_at_once_));
}

void ThreadPoolExecutor::Work() {
  NameThisThread(name_);
  MutexLock lock(mu_);
  for (;;) {
    ++free_threads_;
    while (!HasWork() && !(stopping_ && strands_.empty())) {
      ready_changed_.wait(mu_);
      waking_ = false;
    }
    --free_threads_;
    if (!HasWork()) return;
    if (!resumed_.empty()) {  // before new tasks, so that the fibers soon free what they hold
      Fiber& fiber = *resumed_.front();
      resumed_.pop_front();
      if (ShouldWake()) ready_changed_.notify_one();
      mu_.Unlock();
      Continue(fiber);
      mu_.Lock();
      continue;
    }
    StrandQueue::Next next = strands_.Pop();
    WakeHelper();
    if (ShouldWake()) ready_changed_.notify_one();
    if (!on_fibers_) {
      Run(std::move(next));
      continue;
    }
    Fiber* const fiber = fibers_.Take(*this);
    mu_.Unlock();
    StartOnFiber(fiber, next.strand, std::move(next.task));
    mu_.Lock();
  }
}

void ThreadPoolExecutor::HelperLoop() {
  NameThisThread(name_);
  MutexLock lock(mu_);  // WakeHelper has counted this thread as free
  for (;;) {
    while (!strands_.has_next_of_idle() && !stopping_) help_wanted_.wait(mu_);
    --free_helpers_;
    if (!strands_.has_next_of_idle()) return;
    StrandQueue::Next next = strands_.PopOfIdle();
    WakeHelper();  // more sessions may have become ready while this thread woke up
    Run(std::move(next));
    // Now the strand may run again, or another one of a session that had its maximum of tasks running.
    if (ShouldWake()) ready_changed_.notify_one();
    ++free_helpers_;
  }
}

void ThreadPoolExecutor::Run(StrandQueue::Next next) {
  mu_.Unlock();
  next.task();
  next.task = nullptr;  // releases the objects that the task holds without the lock
  mu_.Lock();
  Finish(next.strand);
}

void ThreadPoolExecutor::Finish(uint64_t strand) {
  const bool again = strands_.Finish(strand);
  // A thread that has run a task looks for the next one itself. A fiber may end elsewhere.
  if (on_fibers_ && ShouldWake()) ready_changed_.notify_one();
  if (again) return;
  if (!strands_.empty()) return;
  idle_.notify_all();
  if (stopping_) ready_changed_.notify_all();
}

void ThreadPoolExecutor::StartOnFiber(Fiber* fiber, uint64_t strand, Task task) {
  auto run = [this, strand, task = std::move(task)]() mutable {
    task();
    task = nullptr;
    MutexLock lock(mu_);
    Finish(strand);
  };
  if (fiber == nullptr) return run();  // no memory for a stack: runs on the thread's own
  fiber->Set(std::move(run), strand);
  Continue(*fiber);
}

void ThreadPoolExecutor::Continue(Fiber& fiber) {
  if (fiber.Run() != Fiber::Outcome::kEnded) return;
  MutexLock lock(mu_);
  fibers_.Return(fiber);
}

void ThreadPoolExecutor::Resume(Fiber& fiber) {
  // Notifies under the lock. Otherwise the fiber could end, and the executor with it, before this returns.
  MutexLock lock(mu_);
  resumed_.push_back(&fiber);
  if (ShouldWake()) ready_changed_.notify_one();
}

}  // namespace precondor
