// SPDX-License-Identifier: Apache-2.0
// The thread that hands gradients in device memory over: it waits until they are computed, which their owner does not.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// Thread-safe.
class DeviceCourier {
 public:
  ~DeviceCourier() { Stop(); }

  // The plane of a device as CUDA counts in this process; made when it is first asked for. Errors: LoadCudaPlane's.
  absl::StatusOr<std::shared_ptr<DevicePlane>> PlaneOf(int device);
  // Calls `job` on the thread, after those before it.
  void Post(std::function<void()> job);
  // Waits until every job so far has been done; false when one has not at the deadline.
  bool WaitIdle(absl::Time deadline);
  // Runs what is left and ends the thread; nothing is posted after it.
  void Stop();

 private:
  void Loop();

  Mutex mu_;
  CondVar changed_;
  std::map<int, std::shared_ptr<DevicePlane>> planes_ ABSL_GUARDED_BY(mu_);
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // from the first job on
};

}  // namespace precondor
