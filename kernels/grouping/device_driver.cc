// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/device_driver.h"

#include <algorithm>
#include <utility>

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"

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

DeviceDriver::DeviceDriver(Round round, const Options& options)
    : round_(std::move(round)), options_(options), runs_fibers_(options.threads), thread_([this] { Loop(); }) {}

DeviceDriver::~DeviceDriver() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  arrived_changed_.notify_one();
  thread_.join();
}

void DeviceDriver::Resume(Fiber& fiber) {
  // Notifies under the lock: without it, the fiber could leave and the driver end before this call returns.
  MutexLock lock(mu_);
  arrived_.push_back(&fiber);
  arrived_changed_.notify_one();
}

void DeviceDriver::Expect(int64_t change) {
  MutexLock lock(mu_);
  expected_ += change;
  if (expected_ == 0) arrived_changed_.notify_one();
}

bool DeviceDriver::RunsCaller() const {
  const Fiber* const fiber = Fiber::Current();
  return fiber != nullptr && &fiber->at() == this;
}

void DeviceDriver::Await(DeferredTask& task) {
  {
    MutexLock lock(mu_);
    waiting_.push_back({Fiber::Current(), &task});
  }
  Fiber::Suspend();
}

void DeviceDriver::Loop() {
  NameThisThread("device");
  for (;;) {
    if (const std::vector<Fiber*> arrived = TakeArrived(); !arrived.empty()) {
      runs_fibers_.Run(arrived);
      continue;  // others may have arrived meanwhile
    }
    std::vector<Waiting> round;
    {
      MutexLock lock(mu_);
      round.swap(waiting_);
      patient_until_.reset();
    }
    if (round.empty()) return;
    RunRound(std::move(round));
  }
}

std::vector<Fiber*> DeviceDriver::TakeArrived() {
  std::vector<Fiber*> arrived;
  {
    MutexLock lock(mu_);
    while (waiting_.empty() && arrived_.size() < options_.fibers_at_start && !stopping_) arrived_changed_.wait(mu_);
    if (arrived_.empty() && !waiting_.empty() && expected_ > 0) {
      if (!patient_until_.has_value()) patient_until_ = MonotonicNow() + options_.patience;
      arrived_changed_.wait_until(mu_, SteadyTime(*patient_until_), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return !arrived_.empty() || expected_ == 0 || waiting_.size() >= options_.most_fibers;
      });
    }
    arrived.swap(arrived_);
  }
  std::stable_sort(arrived.begin(), arrived.end(),
                   [](const Fiber* one, const Fiber* other) { return one->order() < other->order(); });
  return arrived;
}

void DeviceDriver::RunRound(std::vector<Waiting> round) {
  std::stable_sort(round.begin(), round.end(),
                   [](const Waiting& one, const Waiting& other) { return one.fiber->order() < other.fiber->order(); });
  std::vector<DeferredTask*> tasks;
  std::vector<Fiber*> fibers;
  for (const Waiting& waiting : round) {
    tasks.push_back(waiting.task);
    fibers.push_back(waiting.fiber);
  }
  round_(tasks);
  runs_fibers_.Run(fibers);
}

}  // namespace precondor
