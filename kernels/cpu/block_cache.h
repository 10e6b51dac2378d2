// SPDX-License-Identifier: Apache-2.0
// Host memory of the CPU backend: 64-byte aligned blocks. Freed blocks are kept for the next request of the same size
// class, so that steps in the steady state neither map nor unmap pages. Blocks of 64 KiB or more share large pages
// (LargePageHeap): factors are read from end to end, and a small page covers only 4 KiB of that. Under
// AddressSanitizer each block comes from malloc, and cached blocks are poisoned, so that it detects invalid accesses.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"

namespace precondor {

// A heap of blocks that share large (2 MiB) pages. Blocks come from regions of the address space that request such
// pages. Each block gets the lowest address at which it fits. So a block smaller than a page lies on a large page too,
// and so does the end of a block that is a little longer than its pages.
//
// Cost: memory is held in whole pages. If blocks are only taken, that is at most one page more than is taken for each
// region of 1 GiB. If blocks between others are given back, a page stays as long as any block lies in it, until Trim. A
// page without blocks returns to the kernel at once. Thread-safe. All blocks must be given back before its destruction.
class LargePageHeap {
 public:
  static constexpr int64_t kPage = int64_t{2} << 20;
  static constexpr int64_t kAlignment = 64;

  LargePageHeap() = default;
  LargePageHeap(const LargePageHeap&) = delete;
  ~LargePageHeap();

  // Returns a block of `bytes`, aligned to kAlignment, of any contents. Returns nullptr if the system has no memory.
  // Precondition: `bytes` is a positive multiple of kAlignment.
  void* Take(int64_t bytes);
  void Give(void* block, int64_t bytes);
  // Returns free memory in partly used pages to the kernel, in small pages. The rest of such a large page then consists
  // of small pages until the kernel merges them again.
  void Trim();
  // Bytes taken and not yet given back.
  int64_t taken_bytes() const;
  // Bytes of the pages that contain blocks: the most that the kernel may hold for this heap.
  int64_t held_bytes() const;

 private:
  using Ranges = absl::btree_map<uintptr_t, uintptr_t>;  // begin -> end

  Ranges::iterator Fit(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AddRegion(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  int64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  Ranges regions_ ABSL_GUARDED_BY(mu_);  // whole pages
  // Free ranges. Each lies within one region, and adjacent ranges of a region are merged. The kernel holds no memory
  // for whole pages in a free range.
  Ranges free_ ABSL_GUARDED_BY(mu_);
};

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
