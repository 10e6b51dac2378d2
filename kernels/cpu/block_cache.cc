// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/block_cache.h"

#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"

namespace precondor {
namespace {

constexpr int64_t kAlignment = 64;
// Larger blocks live as long as a session does; keeping them would only hide memory.
constexpr int64_t kLargestCachedBytes = int64_t{64} << 20;

// From here on a block begins on a large page and asks for such pages: factors are walked from end to end, and a small
// page lasts for 4 KiB of that walk.
constexpr int64_t kLargePage = int64_t{2} << 20;

void* TakeFromSystem(int64_t bytes) {
  void* block = nullptr;
  if (posix_memalign(&block, bytes < kLargePage ? kAlignment : kLargePage, bytes) != 0) return nullptr;
#ifdef MADV_HUGEPAGE
  // A wish: where the system has no large pages to give, nothing changes. Whole ones alone: the rest belongs to others.
  if (bytes >= kLargePage) madvise(block, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);
#endif
  return block;
}

int64_t BlockBytes(int64_t elements) {
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

BlockCache::BlockCache(int64_t memory_limit_bytes, int64_t cache_limit_bytes)
    : memory_limit_bytes_(memory_limit_bytes), cache_limit_bytes_(cache_limit_bytes) {}

BlockCache::~BlockCache() {
  MutexLock lock(mu_);
  PRECONDOR_CHECK(live_bytes_ == 0);
  for (const auto& [bytes, blocks] : cached_) {
    for (void* block : blocks) std::free(block);
  }
}

void BlockCache::Trim() {
  absl::btree_map<int64_t, std::vector<void*>> cached;
  {
    MutexLock lock(mu_);
    cached.swap(cached_);
    cached_bytes_ = 0;
  }
  for (const auto& [bytes, blocks] : cached) {
    for (void* block : blocks) std::free(block);
  }
}

absl::StatusOr<float*> BlockCache::Allocate(int64_t elements) {
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
  std::memset(block, 0, bytes);
  return static_cast<float*>(block);
}

void BlockCache::Free(float* data, int64_t elements) {
  const int64_t bytes = BlockBytes(elements);
  {
    MutexLock lock(mu_);
    live_bytes_ -= elements * static_cast<int64_t>(sizeof(float));
    if (bytes <= kLargestCachedBytes && bytes <= cache_limit_bytes_ - cached_bytes_) {
      cached_[bytes].push_back(data);
      cached_bytes_ += bytes;
      return;
    }
  }
  std::free(data);
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
