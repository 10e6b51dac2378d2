// SPDX-License-Identifier: Apache-2.0
#include "server/core/scratch_pool.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<ScratchPool::Lease> ScratchPool::Acquire() {
  {
    MutexLock lock(mu_);
    if (!free_.empty()) {
      DeviceMatrix block = std::move(free_.back());
      free_.pop_back();
      return Lease(this, std::move(block));
    }
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix block, backend_.Allocate(1, block_elements_));
  return Lease(this, std::move(block));
}

void ScratchPool::Trim() {
  std::vector<DeviceMatrix> blocks;
  MutexLock lock(mu_);
  blocks.swap(free_);
}

void ScratchPool::Return(DeviceMatrix block) {
  MutexLock lock(mu_);
  free_.push_back(std::move(block));
}

}  // namespace precondor
