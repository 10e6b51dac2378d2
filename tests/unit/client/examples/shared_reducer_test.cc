// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/examples/shared_reducer.h"

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace precondor::digits {
namespace {

constexpr int32_t kRanks = 3;

// Each rank on a thread of its own and with a mapping of its own, as processes have.
void ForEachRank(SharedReducer& creator, int64_t max_elements,
                 const std::function<void(int32_t, SharedReducer&)>& body) {
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      auto reducer = SharedReducer::Attach(dup(creator.fd()), {kRanks, max_elements}, absl::Seconds(60));
      ASSERT_TRUE(reducer.ok()) << reducer.status();
      body(rank, **reducer);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(SharedReducerTest, AveragesByWeightManyTimes) {
  constexpr int kRounds = 200;
  auto creator = SharedReducer::Create({kRanks, 6}, absl::Seconds(60));
  ASSERT_TRUE(creator.ok()) << creator.status();
  ForEachRank(**creator, 6, [](int32_t rank, SharedReducer& reducer) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<float> values(6);
      for (int i = 0; i < 6; ++i) values[static_cast<size_t>(i)] = static_cast<float>(100 * rank + 10 * i + round);
      ASSERT_TRUE(reducer.WeightedMean(rank, rank + 1, MatrixView(values.data(), 2, 3)).ok());
      for (int i = 0; i < 6; ++i) {
        const double rest = 10.0 * i + round;  // (1 * 0 + 2 * 100 + 3 * 200) / 6 = 800 / 6
        EXPECT_FLOAT_EQ(values[static_cast<size_t>(i)], static_cast<float>(800.0 / 6 + rest));
      }
    }
  });
}

TEST(SharedReducerTest, BroadcastsFromAnyRoot) {
  auto creator = SharedReducer::Create({kRanks, 4}, absl::Seconds(60));
  ASSERT_TRUE(creator.ok()) << creator.status();
  ForEachRank(**creator, 4, [](int32_t rank, SharedReducer& reducer) {
    for (int32_t root = 0; root < kRanks; ++root) {
      std::vector<float> values(4, static_cast<float>(rank));
      ASSERT_TRUE(reducer.Broadcast(rank, root, MatrixView(values.data(), 1, 4)).ok());
      EXPECT_EQ(values, std::vector<float>(4, static_cast<float>(root)));
    }
  });
}

TEST(SharedReducerTest, GivesUpOnRanksThatDoNotCome) {
  auto reducer = SharedReducer::Create({2, 1}, absl::Seconds(0));
  ASSERT_TRUE(reducer.ok()) << reducer.status();
  const absl::Status status = (*reducer)->Barrier();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("1 of 2 ranks"));
}

TEST(SharedReducerTest, RefusesWhatDoesNotFit) {
  auto reducer = SharedReducer::Create({1, 2}, absl::Seconds(60));
  ASSERT_TRUE(reducer.ok()) << reducer.status();
  std::vector<float> values(3);
  EXPECT_EQ((*reducer)->WeightedMean(0, 1, MatrixView(values.data(), 1, 3)).code(), absl::StatusCode::kInvalidArgument);
  const int copy = dup((*reducer)->fd());
  EXPECT_EQ(SharedReducer::Attach(copy, {1, 2000}, absl::Seconds(60)).status().code(),
            absl::StatusCode::kInvalidArgument);
  close(copy);
}

}  // namespace
}  // namespace precondor::digits
