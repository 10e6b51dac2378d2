// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/device_driver.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace precondor {

DeviceDriver::DeviceDriver(Round round, int64_t fibers_at_start)
    : round_(std::move(round)), fibers_at_start_(static_cast<size_t>(fibers_at_start)), thread_([this] { Loop(); }) {}

DeviceDriver::~DeviceDriver() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  arrived_changed_.notify_one();
  thread_.join();
}

void DeviceDriver::Resume(Fiber& fiber) {
  // Notified under the lock: without it the fiber could leave, and the driver end, before this returns.
  MutexLock lock(mu_);
  arrived_.push_back(&fiber);
  if (arrived_.size() >= fibers_at_start_) arrived_changed_.notify_one();
}

bool DeviceDriver::RunsCaller() const {
  const Fiber* const fiber = Fiber::Current();
  return fiber != nullptr && &fiber->at() == this;
}

void DeviceDriver::Await(DeferredTask& task) {
  waiting_.push_back({Fiber::Current(), &task});
  Fiber::Suspend();
}

void DeviceDriver::Loop() {
  for (;;) {
    const std::vector<Fiber*> arrived = TakeArrived(/*wait=*/waiting_.empty());
    for (Fiber* const fiber : arrived) fiber->Run();
    if (!arrived.empty()) continue;  // others may have come meanwhile
    if (waiting_.empty()) return;
    RunRound();
  }
}

std::vector<Fiber*> DeviceDriver::TakeArrived(bool wait) {
  std::vector<Fiber*> arrived;
  {
    MutexLock lock(mu_);
    while (wait && arrived_.size() < fibers_at_start_ && !stopping_) arrived_changed_.wait(mu_);
    arrived.swap(arrived_);
  }
  std::stable_sort(arrived.begin(), arrived.end(),
                   [](const Fiber* one, const Fiber* other) { return one->order() < other->order(); });
  return arrived;
}

void DeviceDriver::RunRound() {
  std::vector<Waiting> round = std::exchange(waiting_, {});
  std::stable_sort(round.begin(), round.end(),
                   [](const Waiting& one, const Waiting& other) { return one.fiber->order() < other.fiber->order(); });
  std::vector<DeferredTask*> tasks;
  tasks.reserve(round.size());
  for (const Waiting& waiting : round) tasks.push_back(waiting.task);
  round_(tasks);
  for (const Waiting& waiting : round) waiting.fiber->Run();
}

}  // namespace precondor
