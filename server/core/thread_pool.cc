// SPDX-License-Identifier: Apache-2.0
#include "server/core/thread_pool.h"

#include <algorithm>
#include <utility>

namespace precondor {

ThreadPoolExecutor::ThreadPoolExecutor(int threads) {
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

void ThreadPoolExecutor::Drain() {
  MutexLock lock(mu_);
  while (!strands_.empty()) idle_.wait(mu_);
}

void ThreadPoolExecutor::Work() {
  MutexLock lock(mu_);
  for (;;) {
    while (ready_.empty() && !(stopping_ && strands_.empty())) ready_changed_.wait(mu_);
    if (ready_.empty()) return;
    const uint64_t strand = ready_.front();
    ready_.pop_front();
    Task task = std::move(strands_.at(strand).front());
    strands_.at(strand).pop_front();
    mu_.Unlock();
    task();
    task = nullptr;  // what it holds is released without the lock
    mu_.Lock();
    auto entry = strands_.find(strand);
    if (!entry->second.empty()) {
      ready_.push_back(strand);
      ready_changed_.notify_one();
      continue;
    }
    strands_.erase(entry);
    if (!strands_.empty()) continue;
    idle_.notify_all();
    if (stopping_) ready_changed_.notify_all();
  }
}

}  // namespace precondor
