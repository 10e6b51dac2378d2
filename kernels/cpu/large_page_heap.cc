// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/large_page_heap.h"

#include <algorithm>
#include <iterator>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/base/check.h"

namespace precondor {
namespace {

constexpr uintptr_t kPage = LargePageHeap::kPage;
// Address space of a region; the kernel backs only pages in use. It is large, so that the page at a region's end, which
// may be held in part, is a small share of it.
constexpr uintptr_t kRegion = 512 * kPage;

constexpr uintptr_t Down(uintptr_t address, uintptr_t unit) { return address / unit * unit; }
constexpr uintptr_t Up(uintptr_t address, uintptr_t unit) { return Down(address + unit - 1, unit); }

// Converts an address within a mapping to a pointer.
// NOLINTNEXTLINE(performance-no-int-to-ptr)
void* Pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

void GiveToKernel(uintptr_t begin, uintptr_t end) {
  // If this fails, the memory stays held, which is harmless.
  if (begin < end) madvise(Pointer(begin), end - begin, MADV_DONTNEED);
}

void* Map(uintptr_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int64_t bytes() const { return begin < end ? static_cast<int64_t>(end - begin) : 0; }
};

// Returns the pages of a block that contain only the block, given that `around` is free except for the block.
Range OwnPages(Range block, Range around) {
  return {std::max(Up(around.begin, kPage), Down(block.begin, kPage)),
          std::min(Down(around.end, kPage), Up(block.end, kPage))};
}

}  // namespace

LargePageHeap::~LargePageHeap() {
  MutexLock lock(mu_);
  PRECONDOR_CHECK(taken_bytes_ == 0 && regions_.empty());
}

LargePageHeap::Ranges::iterator LargePageHeap::Fit(int64_t bytes) {
  return std::find_if(free_.begin(), free_.end(), [bytes](const auto& range) {
    return Range{range.first, range.second}.bytes() >= bytes;
  });
}

bool LargePageHeap::AddRegion(int64_t bytes) {
  const uintptr_t least = Up(static_cast<uintptr_t>(bytes), kPage);
  uintptr_t length = std::max(kRegion, least);
  void* mapped = Map(length + kPage);
  if (mapped == MAP_FAILED && length > least) {  // a system that does not overcommit memory
    length = least;
    mapped = Map(length + kPage);
  }
  if (mapped == MAP_FAILED) return false;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped), end = begin + length + kPage;
  const uintptr_t first = Up(begin, kPage), last = first + length;
  if (begin < first) munmap(mapped, first - begin);
  if (last < end) munmap(Pointer(last), end - last);
#ifdef MADV_HUGEPAGE
  // A hint, without effect if the system has no large pages.
  madvise(Pointer(first), length, MADV_HUGEPAGE);
#endif
  regions_.emplace(first, last);
  free_.emplace(first, last);
  return true;
}

void* LargePageHeap::Take(int64_t bytes) {
  PRECONDOR_CHECK(bytes > 0 && bytes % kAlignment == 0);
  MutexLock lock(mu_);
  auto fit = Fit(bytes);
  if (fit == free_.end()) {
    if (!AddRegion(bytes)) return nullptr;
    fit = Fit(bytes);
  }
  const Range range = {fit->first, fit->second};
  const Range block = {range.begin, range.begin + static_cast<uintptr_t>(bytes)};
  free_.erase(fit);
  if (block.end < range.end) free_.emplace(block.end, range.end);
  held_bytes_ += OwnPages(block, range).bytes();
  taken_bytes_ += bytes;
  return Pointer(block.begin);
}

void LargePageHeap::Give(void* data, int64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const Range block = {begin, begin + static_cast<uintptr_t>(bytes)};
  MutexLock lock(mu_);
  const auto region = std::prev(regions_.upper_bound(begin));
  Range range = block;
  auto next = free_.lower_bound(block.begin);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    PRECONDOR_CHECK(before->second <= block.begin);
    if (before->second == block.begin && block.begin != region->first) {
      range.begin = before->first;
      free_.erase(before);
      next = free_.lower_bound(block.begin);
    }
  }
  if (next != free_.end()) {
    PRECONDOR_CHECK(next->first >= block.end);
    if (next->first == block.end && block.end != region->second) {
      range.end = next->second;
      free_.erase(next);
    }
  }
  const Range own = OwnPages(block, range);
  held_bytes_ -= own.bytes();
  taken_bytes_ -= bytes;
  if (range.begin == region->first && range.end == region->second) {
    munmap(Pointer(range.begin), range.end - range.begin);
    regions_.erase(region);
    return;
  }
  GiveToKernel(own.begin, own.end);
  free_.emplace(range.begin, range.end);
}

void LargePageHeap::Trim() {
  const uintptr_t small = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  MutexLock lock(mu_);
  for (const auto& [begin, end] : free_) {
    const uintptr_t first = Up(begin, small), last = Down(end, small);
    // Whole pages in between are skipped: the kernel has them already.
    GiveToKernel(first, std::min(last, Up(begin, kPage)));
    GiveToKernel(std::max(first, Down(end, kPage)), last);
  }
}

int64_t LargePageHeap::taken_bytes() const {
  MutexLock lock(mu_);
  return taken_bytes_;
}

int64_t LargePageHeap::held_bytes() const {
  MutexLock lock(mu_);
  return held_bytes_;
}

}  // namespace precondor
