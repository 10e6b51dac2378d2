// SPDX-License-Identifier: Apache-2.0
// The CUDA devices that a worker's gradients lie on.
#pragma once

#include <map>
#include <memory>

#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"
#include "kernels/region_copy_queue.h"

namespace precondor {

// A device's plane, and the queue that takes answers out of slots.
struct WorkerPlane {
  explicit WorkerPlane(std::shared_ptr<DevicePlane> of_device) : plane(std::move(of_device)), answers(*plane) {}
  const std::shared_ptr<DevicePlane> plane;
  RegionCopyQueue answers;
};

// Thread-safe. Outlives the links, whose answers its queues take.
class PlaneTable {
 public:
  // Returns the plane of a CUDA device, by its number in this process. The first call loads it; later calls return the
  // same plane or the same error. Errors: those of LoadCudaPlane.
  absl::StatusOr<WorkerPlane*> Of(int device);

 private:
  Mutex mu_;
  std::map<int, absl::StatusOr<std::unique_ptr<WorkerPlane>>> planes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
