// SPDX-License-Identifier: Apache-2.0
#include "server/core/resources/payload_pool.h"

#include <gtest/gtest.h>
#include <utility>

namespace precondor {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

Payload Filled(uint64_t bytes) { return Payload(bytes, 7); }

TEST(PayloadPoolTest, GivesTheMemoryOfASharedPayloadToTheNextOne) {
  const auto pool = std::make_shared<PayloadPool>(8 * kMiB);
  std::shared_ptr<const Payload> shared = pool->Share(Filled(2 * kMiB));
  const uint8_t* const memory = shared->data();
  EXPECT_NE(pool->Take(2 * kMiB).data(), memory) << "it is in use";
  shared = nullptr;
  const Payload next = pool->Take(2 * kMiB - 100);
  EXPECT_EQ(next.data(), memory);
  EXPECT_TRUE(next.empty());
  EXPECT_NE(pool->Take(2 * kMiB).data(), memory) << "it is in use again";
}

TEST(PayloadPoolTest, GivesNoMemoryThatIsTooSmallOrMuchTooLarge) {
  const auto pool = std::make_shared<PayloadPool>(8 * kMiB);
  Payload payload = Filled(4 * kMiB);
  const uint8_t* const memory = payload.data();
  pool->Give(std::move(payload));
  EXPECT_NE(pool->Take(4 * kMiB + 1).data(), memory);
  EXPECT_NE(pool->Take(3 * kMiB).data(), memory);
  EXPECT_EQ(pool->Take(4 * kMiB - 100).data(), memory);
}

TEST(PayloadPoolTest, KeepsTheNewestUpToItsLimit) {
  const auto pool = std::make_shared<PayloadPool>(5 * kMiB);
  Payload oldest = Filled(2 * kMiB), newer = Filled(2 * kMiB), newest = Filled(2 * kMiB);
  const uint8_t* const memory[] = {newest.data(), newer.data()};
  for (Payload* payload : {&oldest, &newer, &newest}) pool->Give(std::move(*payload));
  const Payload first = pool->Take(2 * kMiB), second = pool->Take(2 * kMiB);
  EXPECT_EQ(first.data(), memory[0]);
  EXPECT_EQ(second.data(), memory[1]);
  EXPECT_EQ(first.capacity(), 2 * kMiB);
}

TEST(PayloadPoolTest, SharedPayloadsOutliveIt) {
  auto pool = std::make_shared<PayloadPool>(8 * kMiB);
  const std::shared_ptr<const Payload> shared = pool->Share(Filled(2 * kMiB));
  pool = nullptr;
  EXPECT_EQ(shared->size(), 2 * kMiB);
  EXPECT_EQ(shared->back(), 7);
}

TEST(PayloadPoolTest, ASessionKeepsAGradientForEachRank) {
  SessionSpec spec;
  spec.world_size = 3;
  spec.gradient_dtype = DType::kBF16;
  spec.layers = {{.name = "small", .d_out = 4, .d_in = 4}, {.name = "large", .d_out = 1024, .d_in = 1024}};
  EXPECT_EQ(MostKeptBytes(spec), static_cast<int64_t>(3 * 2 * kMiB));
  spec.layers[0].d_out = spec.layers[0].d_in = 1 << 16;
  EXPECT_EQ(MostKeptBytes(spec), static_cast<int64_t>(3 * 64 * kMiB));
}

}  // namespace
}  // namespace precondor
