// SPDX-License-Identifier: Apache-2.0
#include "server/core/scratch_pool.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<ScratchPool::Lease> ScratchPool::Acquire() {
  int64_t elements = 0;
  {
    MutexLock lock(mu_);
    elements = block_elements_;
    if (!free_.empty()) {
      Block block = std::move(free_.back());
      free_.pop_back();
      return Lease(this, std::move(block.memory), block.idle);
    }
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix block, backend_.Allocate(1, elements));
  return Lease(this, std::move(block), /*was_idle=*/false);
}

void ScratchPool::Trim() {
  std::vector<Block> blocks;
  MutexLock lock(mu_);
  blocks.swap(free_);
}

void ScratchPool::Grow(int64_t block_elements) {
  std::vector<Block> outgrown;
  MutexLock lock(mu_);
  if (block_elements <= block_elements_) return;
  block_elements_ = block_elements;
  outgrown.swap(free_);
}

void ScratchPool::Return(Block block) {
  MutexLock lock(mu_);
  if (block.memory.view().size() >= block_elements_) free_.push_back(std::move(block));
}

}  // namespace precondor
