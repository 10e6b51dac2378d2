// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/examples/rank_reducer.h"
#include "client/cpp/examples/seeded_random.h"
#include "client/cpp/examples/trainer.h"

namespace precondor::digits {
namespace {

// Few enough examples for one batch and a little, so that steps are quick.
DigitsData SmallData() {
  Examples all{HostMatrix(200, kPixels), std::vector<int32_t>(200)};
  SeededRandom random(5, 1);
  for (float& pixel : all.pixels.data()) pixel = static_cast<float>(random.Uniform());
  for (int64_t i = 0; i < all.size(); ++i) {  // two classes that a weight tells apart
    all.labels[static_cast<size_t>(i)] = all.pixels.view().at(i, 0) < 0.5f ? 0 : 1;
  }
  return Split(all, 1);
}

Run SomeRun(int64_t steps) {
  Run run;
  run.task = *FindTask("classifier");
  run.task.steps = steps;
  run.workers = 3;
  run.learning_rate = 0.01;
  return run;
}

// Leaves gradients as they are.
class PlainExchange final : public GradientExchange {
 public:
  explicit PlainExchange(bool apply) : apply_(apply) {}
  RowRange Rows(int64_t batch_size) const override { return RowRange{0, batch_size}; }
  absl::Status LayerReady(uint64_t, const LayerTap&) override { return absl::OkStatus(); }
  absl::StatusOr<bool> Finish(uint64_t, double, double) override { return apply_; }

 private:
  const bool apply_;
};

TEST(RowsOfRankTest, CoversTheBatchWithUnevenParts) {
  int64_t next = 0;
  for (int64_t rank = 0; rank < 7; ++rank) {
    const RowRange range = RowsOfRank(128, 7, rank);
    EXPECT_EQ(range.begin, next);
    EXPECT_TRUE(range.count == 18 || range.count == 19);
    next += range.count;
  }
  EXPECT_EQ(next, 128);
}

// As the program does: with more threads, what a sum gives may change from call to call.
class TrainTest : public testing::Test {
 protected:
  TrainTest() { UseSingleThreadedBlas(); }
};

TEST_F(TrainTest, IsAFunctionOfTheRunAndEvaluatesNowAndThen) {
  const DigitsData data = SmallData();
  PlainExchange plain(true);
  const auto first = Train(SomeRun(25), data, plain, TrainOptions());
  const auto again = Train(SomeRun(25), data, plain, TrainOptions());
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(HashWeights(first->weights), HashWeights(again->weights));
  ASSERT_EQ(first->curve.size(), 3u);  // after 10, 20 and 25 steps
  EXPECT_EQ(first->curve.back().step, 25);
  EXPECT_LT(first->curve.back().training_loss, first->curve.front().training_loss);
}

TEST_F(TrainTest, GoesOnFromAnyOfItsCheckpointsBitwise) {
  const DigitsData data = SmallData();
  const digits::Run run = SomeRun(25);
  const auto path = [](int64_t step) { return absl::StrCat(::testing::TempDir(), "digits_", getpid(), "_", step); };
  TrainOptions options;
  options.checkpoint = [&](const TrainState& state) { return WriteCheckpoint(path(state.step), state); };
  PlainExchange plain(true);
  const auto whole = Train(run, data, plain, options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  TrainState state;
  for (const int64_t step : {0, 1, 13, 24}) {
    const auto found = ReadCheckpoint(path(step), run.task.model, state);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_TRUE(*found);
    EXPECT_EQ(state.step, step);
    const auto rest = Train(run, data, plain, {.resume = &state});
    ASSERT_TRUE(rest.ok()) << rest.status();
    EXPECT_EQ(HashWeights(rest->weights), HashWeights(whole->weights)) << "from step " << step;
    EXPECT_EQ(rest->curve.back().held_out_loss, whole->curve.back().held_out_loss);
  }
  EXPECT_EQ(*ReadCheckpoint(path(25), run.task.model, state), false) << "there is none after the end";
  EXPECT_EQ(ReadCheckpoint(path(3), FindTask("autoencoder")->model, state).status().code(),
            absl::StatusCode::kDataLoss);
  std::filesystem::resize_file(path(3), std::filesystem::file_size(path(3)) - 1);
  EXPECT_EQ(ReadCheckpoint(path(3), run.task.model, state).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(TrainTest, LeavesTheWeightsAloneInSkippedSteps) {
  const digits::Run run = SomeRun(3);
  PlainExchange skipping(false);
  const auto result = Train(run, SmallData(), skipping, TrainOptions());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->skipped_steps, 3);
  EXPECT_EQ(HashWeights(result->weights), HashWeights(Mlp(run.task.model, run.seed).weights()));
}

TEST(HashWeightsTest, SeesEveryBit) {
  HostMatrix weight(2, 2);
  const uint64_t before = HashWeights({weight});
  weight.data()[3] = -0.0f;
  EXPECT_NE(HashWeights({weight}), before);
}

TEST(RankReducerTest, AveragesByWeightAndBroadcastsManyTimes) {
  constexpr int32_t kRanks = 3;
  RankReducer reducer(kRanks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int round = 0; round < 200; ++round) {
        std::vector<float> values;
        for (int i = 0; i < 6; ++i) values.push_back(static_cast<float>(100 * rank + 10 * i + round));
        reducer.WeightedMean(rank, rank + 1, MatrixView(values.data(), 2, 3));
        for (int i = 0; i < 6; ++i) {  // (1 * 0 + 2 * 100 + 3 * 200) / 6 = 800 / 6
          EXPECT_FLOAT_EQ(values[static_cast<size_t>(i)], static_cast<float>(800.0 / 6 + 10.0 * i + round));
        }
        values.assign(6, static_cast<float>(rank));
        reducer.Broadcast(rank, round % kRanks, MatrixView(values.data(), 1, 6));
        EXPECT_EQ(values, std::vector<float>(6, static_cast<float>(round % kRanks)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace precondor::digits
