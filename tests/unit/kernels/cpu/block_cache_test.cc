// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/block_cache.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

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

}  // namespace
}  // namespace precondor
