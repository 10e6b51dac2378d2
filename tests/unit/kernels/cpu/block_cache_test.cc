// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/block_cache.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "kernels/base/sanitizers.h"

namespace precondor {
namespace {

constexpr bool kAddressSanitizer = PRECONDOR_HAS_ASAN;

TEST(BlockCacheTest, GivesAlignedZeroedBlocksEvenWhenReused) {
  BlockCache cache(1 << 20, 1 << 20);
  for (int round = 0; round < 2; ++round) {
    float* block = *cache.Allocate(100);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 64, 0u);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(block[i], 0.0f);
    for (int i = 0; i < 100; ++i) block[i] = 7.0f;
    cache.Free(block, 100);
  }
}

TEST(BlockCacheTest, BlocksShareLargePages) {
  if (kAddressSanitizer) GTEST_SKIP() << "AddressSanitizer has each block from malloc";
  BlockCache cache(16 << 20, 0);
  constexpr int64_t kElements = (512 << 10) / 4;
  std::vector<float*> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(*cache.Allocate(kElements));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks[0]) % (2 << 20), 0u);
  for (int i = 1; i < 6; ++i) EXPECT_EQ(blocks[i], blocks[0] + i * kElements);
  for (float* block : blocks) cache.Free(block, kElements);
}

TEST(BlockCacheTest, AddressSanitizerSeesWhatGoesWrong) {
  if (!kAddressSanitizer) GTEST_SKIP() << "needs AddressSanitizer";
  BlockCache cache(16 << 20, 16 << 20);
  for (const int64_t elements : {100 << 10, 200}) {
    volatile float* block = *cache.Allocate(elements);
    const int64_t end = (elements + 15) / 16 * 16;
    EXPECT_DEATH(block[end] = 1.0f, "AddressSanitizer");
    EXPECT_DEATH(block[-1] = 1.0f, "AddressSanitizer");
    cache.Free(const_cast<float*>(block), elements);
    EXPECT_DEATH(block[0] = 1.0f, "AddressSanitizer: use-after-poison") << "kept for the next one";
    EXPECT_EQ(*cache.Allocate(elements), block);
    block[elements - 1] = 1.0f;
    cache.Free(const_cast<float*>(block), elements);
    cache.Trim();
    EXPECT_DEATH(block[0] = 1.0f, "AddressSanitizer: heap-use-after-free");
  }
}

TEST(BlockCacheTest, CountsLiveBytesExactly) {
  BlockCache cache(1 << 20, 1 << 20);
  float* a = *cache.Allocate(3);
  float* b = *cache.Allocate(1000);
  EXPECT_EQ(cache.live_bytes(), 4 * 1003);
  cache.Free(a, 3);
  EXPECT_EQ(cache.live_bytes(), 4000);
  cache.Free(b, 1000);
  EXPECT_EQ(cache.live_bytes(), 0);
}

TEST(BlockCacheTest, RefusesBeyondTheLimitWithTheNumbersAndGoesOn) {
  BlockCache cache(4096, 0);
  float* a = *cache.Allocate(512);
  const auto refused = cache.Allocate(513);
  ASSERT_TRUE(absl::IsResourceExhausted(refused.status()));
  for (const char* number : {"2052", "2048", "4096"}) {
    EXPECT_THAT(std::string(refused.status().message()), testing::HasSubstr(number));
  }
  float* b = *cache.Allocate(512);
  cache.Free(a, 512);
  cache.Free(b, 512);
}

TEST(BlockCacheTest, KeepsFreedBlocksUntilItIsTrimmed) {
  BlockCache cache(1 << 20, 1 << 20);
  float* block = *cache.Allocate(100);
  cache.Free(block, 100);
  EXPECT_EQ(cache.cached_bytes(), 448);  // 400, in steps of 64
  cache.Trim();
  EXPECT_EQ(cache.cached_bytes(), 0);
  block = *cache.Allocate(100);
  EXPECT_EQ(block[99], 0.0f);
  cache.Free(block, 100);
  EXPECT_EQ(cache.cached_bytes(), 448);
}

TEST(BlockCacheTest, ServesManyThreads) {
  BlockCache cache(1 << 24, 1 << 16);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&cache, t] {
      for (int i = 0; i < 500; ++i) {
        const int64_t elements = 1 + (i * 37 + t) % 300;
        float* block = *cache.Allocate(elements);
        for (int64_t j = 0; j < elements; ++j) ASSERT_EQ(block[j], 0.0f);
        block[0] = static_cast<float>(t);
        block[elements - 1] = static_cast<float>(t);
        cache.Free(block, elements);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(cache.live_bytes(), 0);
}

constexpr int64_t kPage = LargePageHeap::kPage;
constexpr int64_t kKib = 1024;

// Bytes of [data, data + bytes) that the kernel holds, by its small pages.
int64_t Resident(const void* data, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + bytes;
  std::vector<unsigned char> in_core((end - begin + page - 1) / page);
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  EXPECT_EQ(mincore(reinterpret_cast<void*>(begin), end - begin, in_core.data()), 0);
  return page * std::count_if(in_core.begin(), in_core.end(), [](unsigned char at) { return (at & 1) != 0; });
}

// A pattern that no other block has, by its number.
void Write(void* block, int64_t bytes, uint64_t number) {
  uint64_t* words = static_cast<uint64_t*>(block);
  for (int64_t i = 0; i < bytes / 8; ++i) words[i] = number * 0x9e3779b97f4a7c15 + i;
}
bool Holds(const void* block, int64_t bytes, uint64_t number) {
  const uint64_t* words = static_cast<const uint64_t*>(block);
  for (int64_t i = 0; i < bytes / 8; ++i) {
    if (words[i] != number * 0x9e3779b97f4a7c15 + i) return false;
  }
  return true;
}

TEST(LargePageHeapTest, SmallBlocksShareAPageAndLieOneBehindTheOther) {
  LargePageHeap heap;
  std::vector<char*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(static_cast<char*>(heap.Take(256 * kKib)));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks[0]) % kPage, 0u);
  for (int i = 1; i < 8; ++i) EXPECT_EQ(blocks[i] - blocks[0], i * 256 * kKib);
  EXPECT_EQ(heap.taken_bytes(), kPage);
  EXPECT_EQ(heap.held_bytes(), kPage);
  for (char* block : blocks) heap.Give(block, 256 * kKib);
  EXPECT_EQ(heap.held_bytes(), 0);
}

TEST(LargePageHeapTest, TheEndBeyondAPageIsSharedToo) {
  LargePageHeap heap;
  constexpr int64_t kTiles = 2228224;  // of a factor with d = 1024 in f32: a page and 128 KiB
  std::vector<void*> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(heap.Take(kTiles));
  EXPECT_EQ(heap.taken_bytes(), 16 * kTiles);
  EXPECT_EQ(heap.held_bytes(), 17 * kPage) << "what 16 of them take, and no page more";
  for (void* block : blocks) heap.Give(block, kTiles);
}

TEST(LargePageHeapTest, HoldsFewPerCentMoreThanIsTaken) {
  // The blocks of BERT-Large's low-rank factors at r = 128, and of dense ones in f32 and f16 tiles.
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{524288, 524288, 2097152}, {2228224, 34078720}, {1114112, 17039360}}) {
    LargePageHeap heap;
    std::vector<std::pair<void*, int64_t>> blocks;
    for (int i = 0; i < 144; ++i) blocks.emplace_back(nullptr, sizes[i % sizes.size()]);
    for (auto& [block, bytes] : blocks) block = heap.Take(bytes);
    EXPECT_GE(heap.held_bytes(), heap.taken_bytes());
    EXPECT_LE(static_cast<double>(heap.held_bytes()), 1.02 * static_cast<double>(heap.taken_bytes()));
    for (auto& [block, bytes] : blocks) heap.Give(block, bytes);
    EXPECT_EQ(heap.taken_bytes(), 0);
    EXPECT_EQ(heap.held_bytes(), 0);
  }
}

TEST(LargePageHeapTest, APageWithNothingLeftGoesBackToTheKernel) {
  LargePageHeap heap;
  std::vector<char*> blocks;
  for (int i = 0; i < 6; ++i) {  // two pages
    blocks.push_back(static_cast<char*>(heap.Take(kPage / 3 / 64 * 64)));
    std::memset(blocks[i], 1, kPage / 3 / 64 * 64);
  }
  char* behind = static_cast<char*>(heap.Take(kPage));
  std::memset(behind, 1, kPage);
  EXPECT_EQ(Resident(blocks[0], 2 * kPage), 2 * kPage);
  for (const int i : {1, 0, 2}) heap.Give(blocks[i], kPage / 3 / 64 * 64);
  // The fourth begins before the first page's end.
  EXPECT_EQ(Resident(blocks[0], 2 * kPage), 2 * kPage);
  heap.Give(blocks[3], kPage / 3 / 64 * 64);
  EXPECT_EQ(Resident(blocks[0], 2 * kPage), kPage);
  EXPECT_EQ(heap.held_bytes(), 2 * kPage);
  for (const int i : {5, 4}) heap.Give(blocks[i], kPage / 3 / 64 * 64);
  EXPECT_EQ(Resident(blocks[0], 2 * kPage), kPage) << "the last one begins before the second page's end";
  heap.Give(behind, kPage);
}

TEST(LargePageHeapTest, TrimGivesTheKernelWhatIsFreeBetweenBlocks) {
  LargePageHeap heap;
  constexpr int64_t kBlock = 256 * kKib;
  std::vector<char*> blocks;
  for (int i = 0; i < 32; ++i) {
    blocks.push_back(static_cast<char*>(heap.Take(kBlock)));
    Write(blocks[i], kBlock, i);
  }
  for (int i = 0; i < 32; i += 2) heap.Give(blocks[i], kBlock);
  EXPECT_EQ(Resident(blocks[0], 32 * kBlock), 32 * kBlock) << "each page has blocks in it";
  heap.Trim();
  EXPECT_EQ(Resident(blocks[0], 32 * kBlock), 16 * kBlock);
  for (int i = 1; i < 32; i += 2) EXPECT_TRUE(Holds(blocks[i], kBlock, i)) << i;
  EXPECT_EQ(heap.Take(kBlock), blocks[0]) << "where there is room at the lowest address";
  Write(blocks[0], kBlock, 0);
  heap.Give(blocks[0], kBlock);
  for (int i = 1; i < 32; i += 2) heap.Give(blocks[i], kBlock);
}

TEST(LargePageHeapTest, TakesBlocksBeyondARegion) {
  LargePageHeap heap;
  constexpr int64_t kLong = (int64_t{1100} << 20) + 64;
  char* longer = static_cast<char*>(heap.Take(kLong));
  ASSERT_NE(longer, nullptr);
  longer[0] = longer[kLong - 1] = 1;
  char* after = static_cast<char*>(heap.Take(64 * kKib));
  EXPECT_EQ(after - longer, kLong) << "in what is left of its last page";
  heap.Give(longer, kLong);
  EXPECT_EQ(heap.held_bytes(), kPage);
  heap.Give(after, 64 * kKib);
}

TEST(LargePageHeapTest, SaysWhenTheSystemHasNoMemory) {
  LargePageHeap heap;
  EXPECT_EQ(heap.Take(int64_t{1} << 50), nullptr);
  EXPECT_EQ(heap.taken_bytes(), 0);
}

TEST(LargePageHeapTest, BlocksOfAnySizeComeAndGoWithoutTouchingEachOther) {
  LargePageHeap heap;
  std::mt19937_64 random(7);
  struct Block {
    void* data;
    int64_t bytes;
    uint64_t number;
  };
  std::vector<Block> blocks;
  int64_t taken = 0;
  for (uint64_t i = 0; i < 3000; ++i) {
    if (blocks.size() < 60 && (blocks.empty() || random() % 5 < 3)) {
      const int64_t bytes = 64 * static_cast<int64_t>(1 + random() % (random() % 8 == 0 ? 80000 : 4000));
      Block block = {heap.Take(bytes), bytes, i};
      ASSERT_NE(block.data, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(block.data) % 64, 0u);
      Write(block.data, bytes, i);
      blocks.push_back(block);
      taken += bytes;
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      ASSERT_TRUE(Holds(blocks.back().data, blocks.back().bytes, blocks.back().number));
      heap.Give(blocks.back().data, blocks.back().bytes);
      taken -= blocks.back().bytes;
      blocks.pop_back();
    }
    if (i % 100 == 0) heap.Trim();
    // Held is what the pages with something in them are, counted here from the blocks themselves.
    std::vector<uintptr_t> pages;
    for (const Block& block : blocks) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(block.data);
      for (uintptr_t page = begin / kPage; page <= (begin + block.bytes - 1) / kPage; ++page) pages.push_back(page);
    }
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    ASSERT_EQ(heap.held_bytes(), static_cast<int64_t>(pages.size()) * kPage);
    ASSERT_EQ(heap.taken_bytes(), taken);
  }
  for (const Block& block : blocks) {
    EXPECT_TRUE(Holds(block.data, block.bytes, block.number));
    heap.Give(block.data, block.bytes);
  }
  EXPECT_EQ(heap.held_bytes(), 0);
}

TEST(LargePageHeapTest, ServesManyThreads) {
  LargePageHeap heap;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&heap, t] {
      for (uint64_t i = 0; i < 200; ++i) {
        const int64_t bytes = 64 * static_cast<int64_t>(1 + (i * 373 + t * 11) % 3000);
        void* block = heap.Take(bytes);
        Write(block, bytes, 1000 * t + i);
        if (i % 20 == 0) heap.Trim();
        EXPECT_TRUE(Holds(block, bytes, 1000 * t + i));
        heap.Give(block, bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(heap.taken_bytes(), 0);
}

}  // namespace
}  // namespace precondor
