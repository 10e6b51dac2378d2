// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/scratch_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<ScratchPool::Lease> ScratchPool::Acquire(int64_t elements) {
  elements = std::max(elements, block_elements_);
  {
    MutexLock lock(mu_);
    // Searches from the last returned block to the first.
    const auto found = std::find_if(free_.rbegin(), free_.rend(),
                                    [elements](const Block& block) { return block.memory.view().size() == elements; });
    if (found != free_.rend()) {
      Block block = std::move(*found);
      free_.erase(std::next(found).base());
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

void ScratchPool::Return(Block block) {
  MutexLock lock(mu_);
  free_.push_back(std::move(block));
}

}  // namespace precondor
