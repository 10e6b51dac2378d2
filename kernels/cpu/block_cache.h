// SPDX-License-Identifier: Apache-2.0
// Host memory of the CPU backend: 64-byte aligned blocks, zeroed, with freed blocks kept for the next request of the
// same size class, so that the steady state of a step neither maps nor unmaps pages. Blocks from 64 KiB on lie on large
// pages, which they share (large_page_heap.h): factors are walked from end to end, and a small page lasts for 4 KiB of
// that walk. Under AddressSanitizer each block is malloc's, and kept ones are poisoned, so that it sees what goes
// wrong.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/cpu/large_page_heap.h"

namespace precondor {

// Thread-safe. All blocks must be freed before it dies.
class BlockCache {
 public:
  BlockCache(int64_t memory_limit_bytes, int64_t cache_limit_bytes);
  ~BlockCache();

  // `elements` >= 1 floats, zeroed. ResourceExhausted with needed, live and limit.
  absl::StatusOr<float*> Allocate(int64_t elements);
  // The same with whatever the memory held: for scratch that is written before it is read.
  absl::StatusOr<float*> AllocateUnset(int64_t elements);
  void Free(float* data, int64_t elements);
  // Frees what is kept for later, and gives the kernel what large pages are free in part.
  void Trim();
  // Bytes asked for and not yet freed; rounding and cached blocks are not counted.
  int64_t live_bytes() const;
  // Bytes kept for later, rounding included.
  int64_t cached_bytes() const;

 private:
  void* TakeFromSystem(int64_t bytes);
  void GiveToSystem(void* block, int64_t bytes);

  LargePageHeap heap_;
  const int64_t memory_limit_bytes_;
  const int64_t cache_limit_bytes_;
  mutable Mutex mu_;
  int64_t live_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t cached_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::btree_map<int64_t, std::vector<void*>> cached_ ABSL_GUARDED_BY(mu_);  // by block size
};

}  // namespace precondor
