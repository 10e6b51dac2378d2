// SPDX-License-Identifier: Apache-2.0
// A heap of blocks that share large (2 MiB) pages. Blocks come from regions of the address space that request such
// pages. Each block gets the lowest address at which it fits. So a block smaller than a page lies on a large page too,
// and so does the end of a block that is a little longer than its pages.
//
// Cost: memory is held in whole pages. If blocks are only taken, that is at most one page more than is taken for each
// region of 1 GiB. If blocks between others are given back, a page stays as long as any block lies in it, until Trim. A
// page without blocks returns to the kernel at once.
#pragma once

#include <cstdint>

#include "absl/container/btree_map.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Takes and gives back blocks. Thread-safe. All blocks must be given back before its destruction.
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

}  // namespace precondor
