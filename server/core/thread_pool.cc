// SPDX-License-Identifier: Apache-2.0
#include "server/core/thread_pool.h"

#include <algorithm>
#include <utility>

namespace precondor {
ThreadPoolExecutor::ThreadPoolExecutor(int threads, int tasks_on_fibers)
    : on_fibers_(tasks_on_fibers > 0),
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
  for (std::thread& thread : threads_) thread.join();
  // From here on no thread posts.
  background_.Stop();
}

uint64_t ThreadPoolExecutor::NewStrand() {
  MutexLock lock(mu_);
  return strands_.NewStrand();
}

void ThreadPoolExecutor::Post(uint64_t strand, Task task) {
  {
    MutexLock lock(mu_);
    if (!strands_.Push(strand, std::move(task))) return;
  }
  ready_changed_.notify_one();
}

void ThreadPoolExecutor::Drain() {
  MutexLock lock(mu_);
  while (!strands_.empty()) idle_.wait(mu_);
}

bool ThreadPoolExecutor::HasWork() const {
  return !resumed_.empty() || (strands_.has_ready() && strands_.running() < tasks_at_once_);
}

void ThreadPoolExecutor::Work() {
  MutexLock lock(mu_);
  for (;;) {
    while (!HasWork() && !(stopping_ && strands_.empty())) ready_changed_.wait(mu_);
    if (!HasWork()) return;
    if (!resumed_.empty()) {  // before new tasks, so that what these hold is free soon
      Fiber& fiber = *resumed_.front();
      resumed_.pop_front();
      mu_.Unlock();
      Continue(fiber);
      mu_.Lock();
      continue;
    }
    auto [strand, task] = strands_.Pop();
    if (on_fibers_) {
      Fiber* const fiber = fibers_.Take(*this);
      mu_.Unlock();
      StartOnFiber(fiber, strand, std::move(task));
      mu_.Lock();
      continue;
    }
    mu_.Unlock();
    task();
    task = nullptr;  // what it holds is released without the lock
    mu_.Lock();
    Finish(strand);
  }
}

void ThreadPoolExecutor::Finish(uint64_t strand) {
  if (strands_.Finish(strand)) {
    ready_changed_.notify_one();
    return;
  }
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
  if (fiber == nullptr) return run();  // without memory for a stack: on the thread's own
  fiber->Set(std::move(run), strand);
  Continue(*fiber);
}

void ThreadPoolExecutor::Continue(Fiber& fiber) {
  if (fiber.Run() != Fiber::Outcome::kEnded) return;
  MutexLock lock(mu_);
  fibers_.Return(fiber);
}

void ThreadPoolExecutor::Resume(Fiber& fiber) {
  // Notified under the lock: without it the fiber could end, and the executor with it, before this returns.
  MutexLock lock(mu_);
  resumed_.push_back(&fiber);
  ready_changed_.notify_one();
}

}  // namespace precondor
