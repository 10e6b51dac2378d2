// SPDX-License-Identifier: Apache-2.0
// Small pieces of a device's memory that are free and stay with the backend, so that a step which takes and frees
// hundreds of them asks CUDA for none.
//
// They are free in the stream's order, as after cudaFreeAsync: what was launched before may still use them, what is
// launched after may have them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kernels/base/mutex.h"

namespace precondor::cuda {

// Thread-safe.
class FreeBlocks {
 public:
  static constexpr int64_t kLargestBytes = int64_t{1} << 20;
  static constexpr int64_t kMostBytes = int64_t{64} << 20;  // of all together

  // A block of exactly so many bytes, or null.
  void* Take(int64_t bytes) {
    const MutexLock lock(mu_);
    const auto blocks = blocks_.find(bytes);
    if (blocks == blocks_.end() || blocks->second.empty()) return nullptr;
    void* const block = blocks->second.back();
    blocks->second.pop_back();
    bytes_ -= bytes;
    return block;
  }
  // False where the block is not kept: it is too large, or they would be too many.
  bool Keep(void* block, int64_t bytes) {
    if (bytes > kLargestBytes) return false;
    const MutexLock lock(mu_);
    if (bytes > kMostBytes - bytes_) return false;
    blocks_[bytes].push_back(block);
    bytes_ += bytes;
    return true;
  }
  // All of them, which are kept no longer.
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
