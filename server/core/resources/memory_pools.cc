// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/memory_pools.h"

#include <algorithm>
#include <iterator>
#include <new>
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

int64_t MostKeptBytes(const SessionSpec& spec) {
  if (WorkersPrecondition(spec)) return 0;  // they send no gradients
  int64_t largest = 0;
  for (const LayerSpec& layer : spec.layers) {
    largest = std::max(largest, layer.d_out * layer.d_in * static_cast<int64_t>(ByteSize(spec.gradient_dtype)));
  }
  return spec.world_size * std::min(largest, int64_t{64} << 20);
}

Payload PayloadPool::Take(uint64_t bytes) {
  if (bytes < kLeastBytes) return {};
  MutexLock lock(mu_);
  // The last one that fits, of which the caches may still have a part.
  const auto found = std::find_if(kept_.rbegin(), kept_.rend(), [bytes](const Payload& payload) {
    return payload.capacity() >= bytes && payload.capacity() - bytes <= bytes / 16;
  });
  if (found == kept_.rend()) return {};
  Payload payload = std::move(*found);
  kept_.erase(std::next(found).base());
  kept_bytes_ -= payload.capacity();
  return payload;
}

void PayloadPool::Give(Payload payload) {
  if (payload.capacity() < kLeastBytes || payload.capacity() > most_bytes_) return;
  payload.clear();
  std::vector<Payload> freed;  // without the lock
  MutexLock lock(mu_);
  try {
    freed.reserve(kept_.size());
    kept_.reserve(kept_.size() + 1);
  } catch (const std::bad_alloc&) {
    return;  // frees the payload
  }
  kept_bytes_ += payload.capacity();
  kept_.push_back(std::move(payload));
  size_t first = 0;
  for (; kept_bytes_ > most_bytes_; ++first) {  // the oldest may be of a size that is not asked for any more
    kept_bytes_ -= kept_[first].capacity();
    freed.push_back(std::move(kept_[first]));
  }
  kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(first));
}

std::shared_ptr<const Payload> PayloadPool::Share(Payload payload) {
  return std::shared_ptr<const Payload>(new Payload(std::move(payload)), [pool = weak_from_this()](Payload* shared) {
    if (const auto live = pool.lock()) live->Give(std::move(*shared));
    delete shared;
  });
}

}  // namespace precondor
