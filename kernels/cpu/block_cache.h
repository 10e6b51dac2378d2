// SPDX-License-Identifier: Apache-2.0
// Host memory of the CPU backend: 64-byte aligned blocks. Freed blocks are kept for the next request of the same size
// class, so that steps in the steady state neither map nor unmap pages. Blocks of 64 KiB or more share large pages
// (large_page_heap.h): factors are read from end to end, and a small page covers only 4 KiB of that. Under
// AddressSanitizer each block comes from malloc, and cached blocks are poisoned, so that it detects invalid accesses.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/cpu/large_page_heap.h"

namespace precondor {

// A cache of blocks with a memory limit. Thread-safe. All blocks must be freed before its destruction.
class BlockCache {
 public:
  BlockCache(int64_t memory_limit_bytes, int64_t cache_limit_bytes);
  ~BlockCache();

  // Returns `elements` >= 1 zeroed floats. Returns ResourceExhausted with the needed and live bytes and the limit.
  absl::StatusOr<float*> Allocate(int64_t elements);
  // Returns `elements` >= 1 floats of any contents, for scratch that is written before it is read. Errors: those of
  // Allocate.
  absl::StatusOr<float*> AllocateUnset(int64_t elements);
  void Free(float* data, int64_t elements);
  // Frees cached blocks, and returns the free parts of partly used large pages to the kernel.
  void Trim();
  // Bytes requested and not yet freed, without rounding and cached blocks.
  int64_t live_bytes() const;
  // Bytes of cached blocks, rounding included.
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
