// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/device_courier.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_module.h"

namespace precondor {

absl::StatusOr<std::shared_ptr<DevicePlane>> DeviceCourier::PlaneOf(int device) {
  MutexLock lock(mu_);
  const auto found = planes_.find(device);
  if (found != planes_.end()) return found->second;
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<DevicePlane> plane, LoadCudaPlane(device));
  planes_[device] = plane;
  return plane;
}

void DeviceCourier::Post(std::function<void()> job) {
  MutexLock lock(mu_);
  jobs_.push_back(std::move(job));
  if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
  changed_.notify_all();
}

bool DeviceCourier::WaitIdle(absl::Time deadline) {
  MutexLock lock(mu_);
  return changed_.wait_until(mu_, absl::ToChronoTime(deadline),
                             [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return jobs_.empty() && !busy_; });
}

void DeviceCourier::Stop() {
  std::thread ending;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
    ending = std::move(thread_);
  }
  if (ending.joinable()) ending.join();
}

void DeviceCourier::Loop() {
  while (true) {
    std::function<void()> job;
    {
      MutexLock lock(mu_);
      busy_ = false;
      changed_.notify_all();
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
      busy_ = true;
    }
    job();
  }
}

}  // namespace precondor
