// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/block_cache.h"

#include <cstdlib>
#include <cstring>

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
