// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace precondor {
namespace {

// Known answers of philox4x32-10 as published with the Random123 library (kat_vectors).
TEST(RandomTest, PhiloxGivesTheKnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomTest, IsAFunctionOfKeyAndCounter) {
  const CounterRandom a({1, 2, 3}), b({1, 2, 3});
  for (uint64_t counter : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}}) EXPECT_EQ(a.Bits(counter), b.Bits(counter));
}

TEST(RandomTest, KeysThatDifferInAnyWordOrLengthGiveOtherStreams) {
  const std::vector<std::vector<uint64_t>> keys = {
      {}, {0}, {0, 0}, {1, 2, 3}, {1, 2, 4}, {1, 3, 2}, {2, 2, 3}, {1, 2, 3, 0}, {uint64_t{1} << 63, 2, 3}};
  std::set<uint64_t> seen;
  for (const auto& key : keys) {
    for (uint64_t counter = 0; counter < 4; ++counter) seen.insert(CounterRandom(key).Bits(counter));
  }
  EXPECT_EQ(seen.size(), 4 * keys.size());
}

TEST(RandomTest, BitsAreBalancedAndIndependentOfTheirNeighbours) {
  constexpr int kWords = 20000;
  const CounterRandom random({42});
  int64_t ones = 0, agreements = 0;
  for (int i = 0; i < kWords; ++i) {
    ones += std::popcount(random.Bits(i));
    agreements += std::popcount(~(random.Bits(i) ^ random.Bits(i + 1)));
  }
  // Five standard deviations of a binomial with 64 * 20000 fair trials.
  const double sigma = std::sqrt(64.0 * kWords) / 2;
  EXPECT_NEAR(static_cast<double>(ones), 32.0 * kWords, 5 * sigma);
  EXPECT_NEAR(static_cast<double>(agreements), 32.0 * kWords, 5 * sigma);
}

TEST(RandomTest, NormalsAreNormal) {
  constexpr int kCount = 100000;
  std::vector<float> x(kCount);
  CounterRandom({42}).Normals(0, absl::MakeSpan(x));
  double mean = 0, square = 0, neighbours = 0;
  for (int i = 0; i < kCount; ++i) {
    mean += x[i] / kCount;
    square += static_cast<double>(x[i]) * x[i] / kCount;
    if (i > 0) neighbours += static_cast<double>(x[i]) * x[i - 1] / kCount;
  }
  // Five standard deviations of each estimate.
  const double sigma = 1 / std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(mean, 0, 5 * sigma);
  EXPECT_NEAR(square, 1, 5 * std::sqrt(2.0) * sigma);
  EXPECT_NEAR(neighbours, 0, 5 * sigma);
  std::sort(x.begin(), x.end());
  double distance = 0;
  for (int i = 0; i < kCount; ++i) {
    const double expected = 0.5 * std::erfc(-x[i] / std::sqrt(2.0));
    distance = std::max(distance, std::fabs(expected - (i + 0.5) / kCount));
  }
  // Kolmogorov and Smirnov's statistic exceeds 1.95 in one of a thousand samples.
  EXPECT_LT(distance, 1.95 * sigma);
  EXPECT_LT(std::max(-x.front(), x.back()), 6.8);
}

TEST(RandomTest, NormalsAreAFunctionOfTheirNumber) {
  const CounterRandom random({1, 2});
  std::vector<float> all(11);
  random.Normals(0, absl::MakeSpan(all));
  for (uint64_t first = 0; first < 11; ++first) {
    for (uint64_t count = 1; first + count <= 11; ++count) {
      std::vector<float> part(count);
      random.Normals(first, absl::MakeSpan(part));
      EXPECT_EQ(part, std::vector<float>(all.begin() + first, all.begin() + first + count));
    }
  }
}

}  // namespace
}  // namespace precondor
