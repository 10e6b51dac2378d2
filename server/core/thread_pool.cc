// SPDX-License-Identifier: Apache-2.0
#include "server/core/thread_pool.h"

#include <algorithm>
#include <unistd.h>
#include <utility>

namespace precondor {
namespace {

constexpr int kNiceness = 10;  // a tenth of a core that strands want too

}  // namespace

ThreadPoolExecutor::ThreadPoolExecutor(int threads, int tasks_on_fibers)
    : on_fibers_(tasks_on_fibers > 0), tasks_at_once_(on_fibers_ ? tasks_on_fibers : std::max(1, threads)) {
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
  std::vector<std::thread> background;
  {
    MutexLock lock(mu_);
    background_stopping_ = true;
    background.swap(background_threads_);
  }
  background_changed_.notify_all();
  for (std::thread& thread : background) thread.join();
}

uint64_t ThreadPoolExecutor::NewStrand() {
  MutexLock lock(mu_);
  return ++last_strand_;
}

void ThreadPoolExecutor::Post(uint64_t strand, Task task) {
  {
    MutexLock lock(mu_);
    auto [entry, fresh] = strands_.try_emplace(strand);
    entry->second.push_back(std::move(task));
    // A strand that is in the table already is queued in ready_, or its runner will queue it again.
    if (!fresh) return;
    ready_.push_back(strand);
  }
  ready_changed_.notify_one();
}

void ThreadPoolExecutor::PostBackground(Task task) {
  {
    MutexLock lock(mu_);
    while (background_threads_.size() < threads_.size()) {
      background_threads_.emplace_back([this] { WorkInBackground(); });
    }
    background_.push_back(std::move(task));
  }
  background_changed_.notify_one();
}

void ThreadPoolExecutor::WorkInBackground() {
  // Of this thread alone, as Linux has it.
  (void)!nice(kNiceness);
  MutexLock lock(mu_);
  for (;;) {
    while (background_.empty() && !background_stopping_) background_changed_.wait(mu_);
    if (background_.empty()) return;
    Task task = std::move(background_.front());
    background_.pop_front();
    mu_.Unlock();
    task();
    task = nullptr;  // what it holds is released without the lock
    mu_.Lock();
  }
}

void ThreadPoolExecutor::Drain() {
  MutexLock lock(mu_);
  while (!strands_.empty()) idle_.wait(mu_);
}

bool ThreadPoolExecutor::HasWork() const { return !resumed_.empty() || (!ready_.empty() && running_ < tasks_at_once_); }

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
    const uint64_t strand = ready_.front();
    ready_.pop_front();
    Task task = std::move(strands_.at(strand).front());
    strands_.at(strand).pop_front();
    ++running_;
    if (on_fibers_) {
      Fiber* const fiber = IdleFiber();
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
  --running_;
  auto entry = strands_.find(strand);
  if (!entry->second.empty()) {
    ready_.push_back(strand);
    ready_changed_.notify_one();
    return;
  }
  strands_.erase(entry);
  if (!strands_.empty()) return;
  idle_.notify_all();
  if (stopping_) ready_changed_.notify_all();
}

Fiber* ThreadPoolExecutor::IdleFiber() {
  if (idle_fibers_.empty()) {
    std::unique_ptr<Fiber> made = Fiber::Make(*this);
    if (made == nullptr) return nullptr;
    idle_fibers_.push_back(fibers_.emplace_back(std::move(made)).get());
  }
  Fiber* const fiber = idle_fibers_.back();
  idle_fibers_.pop_back();
  return fiber;
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
  idle_fibers_.push_back(&fiber);
}

void ThreadPoolExecutor::Resume(Fiber& fiber) {
  // Notified under the lock: without it the fiber could end, and the executor with it, before this returns.
  MutexLock lock(mu_);
  resumed_.push_back(&fiber);
  ready_changed_.notify_one();
}

}  // namespace precondor
