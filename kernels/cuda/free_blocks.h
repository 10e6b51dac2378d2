// SPDX-License-Identifier: Apache-2.0
// A cache of small free blocks of device memory. A step takes and frees hundreds of them, and with the cache it does
// not ask CUDA for any.
//
// Blocks are free in stream order, as after cudaFreeAsync: work that was launched before Keep may still use a block,
// and work that is launched after Take may use it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kernels/base/mutex.h"

namespace precondor::cuda {

// Keeps free blocks by size. Thread-safe.
class FreeBlocks {
 public:
  static constexpr int64_t kLargestBytes = int64_t{1} << 20;
  static constexpr int64_t kMostBytes = int64_t{64} << 20;  // limit on the sum of all kept blocks

  // Returns a kept block of exactly `bytes` bytes, or null if there is none.
  void* Take(int64_t bytes) {
    const MutexLock lock(mu_);
    const auto blocks = blocks_.find(bytes);
    if (blocks == blocks_.end() || blocks->second.empty()) return nullptr;
    void* const block = blocks->second.back();
    blocks->second.pop_back();
    bytes_ -= bytes;
    return block;
  }
  // Keeps the block and returns true. Returns false if the block is larger than kLargestBytes or the kept blocks would
  // exceed kMostBytes; the block then stays the caller's.
  bool Keep(void* block, int64_t bytes) {
    if (bytes > kLargestBytes) return false;
    const MutexLock lock(mu_);
    if (bytes > kMostBytes - bytes_) return false;
    blocks_[bytes].push_back(block);
    bytes_ += bytes;
    return true;
  }
  // Removes all kept blocks and returns them.
  std::vector<void*> Clear() {
    const MutexLock lock(mu_);
    std::vector<void*> all;
    for (const auto& [bytes, blocks] : blocks_) all.insert(all.end(), blocks.begin(), blocks.end());
    blocks_.clear();
    bytes_ = 0;
    return all;
  }

 private:
  Mutex mu_;
  absl::flat_hash_map<int64_t, std::vector<void*>> blocks_ ABSL_GUARDED_BY(mu_);  // by size
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor::cuda
