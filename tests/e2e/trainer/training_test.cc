// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <thread>
#include <vector>

#include "kernels/base/random.h"
#include "tests/e2e/trainer/rank_reducer.h"
#include "tests/e2e/trainer/trainer.h"

namespace precondor::digits {
namespace {

// Few enough examples for one batch and a little, so that steps are quick.
DigitsData SmallData() {
  Examples all{HostMatrix(200, kPixels), std::vector<int32_t>(200)};
  const CounterRandom random({5, 1});
  uint64_t drawn = 0;
  for (float& pixel : all.pixels.data()) pixel = static_cast<float>(random.Bits(drawn++) >> 40) * 0x1p-24f;
  for (int64_t i = 0; i < all.size(); ++i) {  // two classes that a weight tells apart
    all.labels[static_cast<size_t>(i)] = all.pixels.view().at(i, 0) < 0.5f ? 0 : 1;
  }
  return DigitsData{all, all};
}

Run SomeRun(int64_t steps) {
  Run run;
  SetTask("classifier", run);
  run.steps = steps;
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

// The weights after all steps from `trainer`'s.
std::vector<HostMatrix> Finish(Trainer& trainer) {
  PlainExchange plain(true);
  while (!trainer.done()) EXPECT_TRUE(trainer.Step(plain).ok());
  return trainer.model().weights();
}

TEST_F(TrainTest, IsAFunctionOfTheRunAndLearns) {
  const DigitsData data = SmallData();
  const digits::Run run = SomeRun(25);
  const auto first = Trainer::Make(run, data), again = Trainer::Make(run, data);
  digits::Run other = run;
  ++other.session.seed;
  EXPECT_NE(HashWeights((*Trainer::Make(other, data))->model().weights()), HashWeights((*first)->model().weights()));
  const double before = (*first)->model().Evaluate(data.train).loss;
  EXPECT_EQ(HashWeights(Finish(**first)), HashWeights(Finish(**again)));
  EXPECT_LT((*first)->model().Evaluate(data.train).loss, before);
}

TEST_F(TrainTest, GoesOnBitwiseFromWeightsAndOptimizerState) {
  const DigitsData data = SmallData();
  const digits::Run run = SomeRun(25);
  PlainExchange plain(true);
  const auto whole = Trainer::Make(run, data), rest = Trainer::Make(run, data);
  while ((*whole)->step() < 13) ASSERT_TRUE((*whole)->Step(plain).ok());
  (*rest)->model().weights() = (*whole)->model().weights();
  ASSERT_TRUE((*rest)->optimizer().LoadState((*whole)->optimizer().SaveState()).ok());
  (*rest)->GoOnFrom(13);
  EXPECT_EQ(HashWeights(Finish(**rest)), HashWeights(Finish(**whole)));
}

TEST_F(TrainTest, LeavesTheWeightsAloneInSkippedSteps) {
  const DigitsData data = SmallData();
  const digits::Run run = SomeRun(3);
  PlainExchange skipping(false);
  const auto trainer = Trainer::Make(run, data);
  while (!(*trainer)->done()) ASSERT_TRUE((*trainer)->Step(skipping).ok());
  EXPECT_EQ((*trainer)->skipped_steps(), 3);
  EXPECT_EQ(HashWeights((*trainer)->model().weights()), HashWeights(Mlp(run.model, run.session.seed).weights()));
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
  threads.reserve(kRanks);
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int round = 0; round < 200; ++round) {
        std::vector<float> values(6);
        for (size_t i = 0; i < 6; ++i) values[i] = static_cast<float>(100 * rank + 10 * static_cast<int>(i) + round);
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
