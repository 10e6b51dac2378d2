// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/fiber_threads.h"

#include "kernels/base/thread_name.h"

namespace precondor {
namespace {

// Waking a thread takes about 50 us, in which the caller's thread runs as many fibers as this.
constexpr size_t kFew = 16;

}  // namespace

FiberThreads::FiberThreads(int threads) {
  for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

FiberThreads::~FiberThreads() {
  {
    const MutexLock lock(mu_);
    stopping_ = true;
    begun_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void FiberThreads::Run(absl::Span<Fiber* const> fibers) {
  next_ = 0;
  if (threads_.empty() || fibers.size() < kFew) return RunSome(fibers);
  {
    const MutexLock lock(mu_);
    batch_ = fibers;
    ++batches_;
    begun_.notify_all();
  }
  RunSome(fibers);
  const MutexLock lock(mu_);
  batch_ = {};  // threads that wake up from now on skip this batch
  ended_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return at_work_ == 0; });
}

void FiberThreads::RunSome(absl::Span<Fiber* const> fibers) {
  for (size_t i = next_++; i < fibers.size(); i = next_++) fibers[i]->Run();
}

void FiberThreads::Loop() {
  NameThisThread("fibers");
  uint64_t seen = 0;
  for (;;) {
    absl::Span<Fiber* const> batch;
    {
      const MutexLock lock(mu_);
      begun_.wait(mu_, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || batches_ != seen; });
      if (stopping_) return;
      seen = batches_;
      if (batch_.empty()) continue;
      batch = batch_;
      ++at_work_;
    }
    RunSome(batch);
    const MutexLock lock(mu_);
    if (--at_work_ == 0) ended_.notify_one();
  }
}

}  // namespace precondor
