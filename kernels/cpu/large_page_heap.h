// SPDX-License-Identifier: Apache-2.0
// Blocks that share large (2 MiB) pages. They come from regions of the address space that ask for such pages, each
// block at the lowest address where it fits, one behind the other: a block of less than a page lies on large pages too,
// and so does the end of one that is a little longer than its pages.
//
// What it costs: memory is held by whole pages. Where blocks came and none went that is at most one page more than is
// taken for each region of 1 GiB; where blocks went from between others, a page stays for as long as any block lies
// in it, until Trim. A page in which nothing is left goes back to the kernel at once.
#pragma once

#include <cstdint>

#include "absl/container/btree_map.h"

#include "kernels/base/mutex.h"

namespace precondor {

// Thread-safe. All blocks must be given back before it dies.
class LargePageHeap {
 public:
  static constexpr int64_t kPage = int64_t{2} << 20;
  static constexpr int64_t kAlignment = 64;

  LargePageHeap() = default;
  LargePageHeap(const LargePageHeap&) = delete;
  ~LargePageHeap();

  // `bytes` > 0, a multiple of kAlignment; so aligned, of any contents. nullptr when the system has no memory.
  void* Take(int64_t bytes);
  void Give(void* block, int64_t bytes);
  // Gives the kernel what is free in pages that are in part taken, by its small pages. What remains of a large page is
  // then small ones, until the kernel makes a large one of it.
  void Trim();
  // Bytes taken and not yet given back.
  int64_t taken_bytes() const;
  // Bytes of the pages in which some are taken: the most that the kernel may hold for this heap.
  int64_t held_bytes() const;

 private:
  using Ranges = absl::btree_map<uintptr_t, uintptr_t>;  // begin -> end

  Ranges::iterator Fit(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AddRegion(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  int64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  Ranges regions_ ABSL_GUARDED_BY(mu_);  // whole pages
  // Each within one region, none beside another one of its region. Of whole pages in a free range the kernel has none.
  Ranges free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
