// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/plane_table.h"

#include <utility>

#include "kernels/cuda/cuda_module.h"

namespace precondor {

absl::StatusOr<WorkerPlane*> PlaneTable::Of(int device) {
  MutexLock lock(mu_);
  auto found = planes_.find(device);
  if (found == planes_.end()) {
    absl::StatusOr<std::unique_ptr<WorkerPlane>> made = nullptr;
    absl::StatusOr<std::unique_ptr<DevicePlane>> plane = LoadCudaPlane(device);
    if (plane.ok()) {
      made = std::make_unique<WorkerPlane>(*std::move(plane));
    } else {
      made = plane.status();
    }
    found = planes_.emplace(device, std::move(made)).first;
  }
  if (!found->second.ok()) return found->second.status();
  return found->second->get();
}

}  // namespace precondor
