// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/block_cache.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sys/mman.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/sanitizers.h"

#if PRECONDOR_HAS_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

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

constexpr int64_t kAlignment = LargePageHeap::kAlignment;
// Larger blocks live as long as a session. Caching them would only hide memory.
constexpr int64_t kLargestCachedBytes = int64_t{64} << 20;
// Smaller blocks are numerous and read in short runs; malloc handles them better.
constexpr int64_t kSmallestShared = int64_t{64} << 10;

bool OnLargePages(int64_t bytes) { return !PRECONDOR_HAS_ASAN && bytes >= kSmallestShared; }

int64_t BlockBytes(int64_t elements) {
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
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

BlockCache::BlockCache(int64_t memory_limit_bytes, int64_t cache_limit_bytes)
    : memory_limit_bytes_(memory_limit_bytes), cache_limit_bytes_(cache_limit_bytes) {}

BlockCache::~BlockCache() {
  PRECONDOR_CHECK(live_bytes() == 0);
  Trim();
}

void* BlockCache::TakeFromSystem(int64_t bytes) {
  if (OnLargePages(bytes)) return heap_.Take(bytes);
  void* block = nullptr;
  return posix_memalign(&block, kAlignment, bytes) == 0 ? block : nullptr;
}

void BlockCache::GiveToSystem(void* block, int64_t bytes) {
  OnLargePages(bytes) ? heap_.Give(block, bytes) : std::free(block);
}

void BlockCache::Trim() {
  absl::btree_map<int64_t, std::vector<void*>> cached;
  {
    MutexLock lock(mu_);
    cached.swap(cached_);
    cached_bytes_ = 0;
  }
  for (const auto& [bytes, blocks] : cached) {
    for (void* block : blocks) {
      ASAN_UNPOISON_MEMORY_REGION(block, bytes);
      GiveToSystem(block, bytes);
    }
  }
  heap_.Trim();
}

absl::StatusOr<float*> BlockCache::Allocate(int64_t elements) {
  absl::StatusOr<float*> block = AllocateUnset(elements);
  if (block.ok()) std::memset(*block, 0, BlockBytes(elements));
  return block;
}

absl::StatusOr<float*> BlockCache::AllocateUnset(int64_t elements) {
  const int64_t asked = elements * static_cast<int64_t>(sizeof(float));
  const int64_t bytes = BlockBytes(elements);
  void* block = nullptr;
  {
    MutexLock lock(mu_);
    if (asked > memory_limit_bytes_ - live_bytes_) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cpu memory: needed ", asked, " bytes, ", live_bytes_, " in use, limit ", memory_limit_bytes_));
    }
    live_bytes_ += asked;
    auto it = cached_.find(bytes);
    if (it != cached_.end() && !it->second.empty()) {
      block = it->second.back();
      it->second.pop_back();
      cached_bytes_ -= bytes;
    }
  }
  if (block == nullptr) block = TakeFromSystem(bytes);
  if (block == nullptr) {
    MutexLock lock(mu_);
    live_bytes_ -= asked;
    return absl::ResourceExhaustedError(absl::StrCat("cpu memory: the system refused ", bytes, " bytes"));
  }
  ASAN_UNPOISON_MEMORY_REGION(block, bytes);
  return static_cast<float*>(block);
}

void BlockCache::Free(float* data, int64_t elements) {
  const int64_t bytes = BlockBytes(elements);
  {
    MutexLock lock(mu_);
    live_bytes_ -= elements * static_cast<int64_t>(sizeof(float));
    if (bytes <= kLargestCachedBytes && bytes <= cache_limit_bytes_ - cached_bytes_) {
      ASAN_POISON_MEMORY_REGION(data, bytes);
      cached_[bytes].push_back(data);
      cached_bytes_ += bytes;
      return;
    }
  }
  GiveToSystem(data, bytes);
}

int64_t BlockCache::live_bytes() const {
  MutexLock lock(mu_);
  return live_bytes_;
}

int64_t BlockCache::cached_bytes() const {
  MutexLock lock(mu_);
  return cached_bytes_;
}

}  // namespace precondor
