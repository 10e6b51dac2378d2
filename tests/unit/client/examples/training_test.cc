// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "client/cpp/examples/in_process_exchange.h"
#include "client/cpp/examples/mlp.h"
#include "client/cpp/examples/rate_search.h"
#include "client/cpp/examples/seeded_random.h"
#include "client/cpp/examples/trainer.h"
#include "precondor/statistics.h"

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

Run SomeRun(const std::string& method, int64_t steps) {
  Run run;
  run.task = *FindTask("classifier");
  run.task.steps = steps;
  run.method = *FindMethod(method);
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

class MergedStatisticsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 11;
  static constexpr int64_t kColumns = 4;
  static constexpr double kRowScale = 2.0;

  MergedStatisticsTest() : rows_(kRows, kColumns) {
    spec_ = MakeSessionSpec(SomeRun("signed", 1), "s");
    spec_.statistics_dtype = DType::kF32;
    SeededRandom random(9, 1);
    for (float& value : rows_.data()) value = static_cast<float>(random.Uniform() - 0.3);
  }
  double MeanOf(RowRange range, int64_t column) const {
    double sum = 0;
    for (int64_t i = 0; i < range.count; ++i) sum += rows_.view().at(range.begin + i, column);
    return sum / static_cast<double>(range.count);
  }

  SessionSpec spec_;
  HostMatrix rows_;
};

TEST_F(MergedStatisticsTest, MeanIsThatOfTheWholeBatch) {
  spec_.statistics = StatisticsKind::kMean;
  const auto merged = MergedStatistics(spec_, SketchKey(), rows_.view(), kRowScale);
  ASSERT_TRUE(merged.ok()) << merged.status();
  ASSERT_EQ(merged->rows(), 1);
  for (int64_t j = 0; j < kColumns; ++j) {
    EXPECT_NEAR(merged->view().at(0, j), kRowScale * MeanOf({0, kRows}, j), 1e-6);
  }
}

TEST_F(MergedStatisticsTest, PerWorkerMeansWeighEveryRowAlike) {
  spec_.statistics = StatisticsKind::kPerWorkerMean;
  const auto merged = MergedStatistics(spec_, SketchKey(), rows_.view(), kRowScale);
  ASSERT_TRUE(merged.ok()) << merged.status();
  ASSERT_EQ(merged->rows(), 3);
  for (int64_t rank = 0; rank < 3; ++rank) {
    const RowRange range = RowsOfRank(kRows, 3, rank);
    const double weight = std::sqrt(3.0 * static_cast<double>(range.count) / kRows);
    for (int64_t j = 0; j < kColumns; ++j) {
      EXPECT_NEAR(merged->view().at(rank, j), weight * kRowScale * MeanOf(range, j), 1e-6);
    }
  }
}

TEST_F(MergedStatisticsTest, SignedTakesEveryRanksSketchesInRankOrder) {
  const SketchKey key{3, 20, 1, Side::kOutput, 0};
  const auto merged = MergedStatistics(spec_, key, rows_.view(), kRowScale);
  ASSERT_TRUE(merged.ok()) << merged.status();
  const int64_t each = VectorsPerWorker(spec_, 0);
  ASSERT_EQ(merged->rows(), 3 * each);
  for (int64_t rank = 0; rank < 3; ++rank) {
    const RowRange range = RowsOfRank(kRows, 3, rank);
    SketchKey own = key;
    own.rank = static_cast<uint32_t>(rank);
    HostMatrix expected(each, kColumns);
    ASSERT_TRUE(
        ComputeStatistics(spec_, own, rows_.view().RowRange(range.begin, range.count), kRowScale, expected.view())
            .ok());
    const double weight = std::sqrt(3.0 * static_cast<double>(range.count) / kRows);
    for (int64_t i = 0; i < each; ++i) {
      for (int64_t j = 0; j < kColumns; ++j) {
        EXPECT_NEAR(merged->view().at(rank * each + i, j), weight * expected.view().at(i, j), 1e-5);
      }
    }
  }
}

TEST_F(MergedStatisticsTest, AreRoundedAsOnTheWire) {
  spec_.statistics = StatisticsKind::kMean;
  spec_.world_size = 1;
  const auto exact = MergedStatistics(spec_, SketchKey(), rows_.view(), kRowScale);
  spec_.statistics_dtype = DType::kF16;
  const auto rounded = MergedStatistics(spec_, SketchKey(), rows_.view(), kRowScale);
  ASSERT_TRUE(exact.ok() && rounded.ok());
  EXPECT_NE(exact->data(), rounded->data());
  for (size_t i = 0; i < exact->data().size(); ++i) {
    // Half a unit in the last of f16's 11 bits.
    EXPECT_NEAR(rounded->data()[i], exact->data()[i], std::abs(exact->data()[i]) * 0x1p-11);
  }
}

// As the program does: with more threads, what a sum gives may change from call to call.
class TrainTest : public testing::Test {
 protected:
  TrainTest() { UseSingleThreadedBlas(); }
};

TEST_F(TrainTest, WithoutAMethodIsThePlainOptimizer) {
  const DigitsData data = SmallData();
  const digits::Run run = SomeRun("none", 25);
  PlainExchange plain(true);
  const auto expected = Train(run, data, plain, TrainOptions());
  const auto result = TrainInProcess(run, data);
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->weights_hash, HashWeights(expected->weights));
  ASSERT_EQ(expected->curve.size(), 3u);  // after 10, 20 and 25 steps
  EXPECT_EQ(expected->curve.back().step, 25);
  EXPECT_LT(expected->curve.back().training_loss, expected->curve.front().training_loss);
}

TEST_F(TrainTest, IsAFunctionOfTheRun) {
  const DigitsData data = SmallData();
  digits::Run run = SomeRun("signed-lowrank", 25);
  const auto first = TrainInProcess(run, data);
  const auto again = TrainInProcess(run, data);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(first->weights_hash, again->weights_hash);
  run.workers = 4;  // other sketches
  const auto other = TrainInProcess(run, data);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE(first->weights_hash, other->weights_hash);
}

TEST_F(TrainTest, GoesOnFromAnyOfItsCheckpointsBitwise) {
  const DigitsData data = SmallData();
  const digits::Run run = SomeRun("none", 25);
  std::vector<TrainState> states;
  TrainOptions options;
  options.checkpoint = [&](const TrainState& state) {
    states.push_back(state);
    return absl::OkStatus();
  };
  PlainExchange plain(true);
  const auto whole = Train(run, data, plain, options);
  ASSERT_TRUE(whole.ok()) << whole.status();
  ASSERT_EQ(states.size(), 25u);
  for (const size_t step : {size_t{0}, size_t{1}, size_t{13}, size_t{24}}) {
    TrainOptions resumed;
    resumed.resume = &states[step];
    PlainExchange again(true);
    const auto rest = Train(run, data, again, resumed);
    ASSERT_TRUE(rest.ok()) << rest.status();
    EXPECT_EQ(HashWeights(rest->weights), HashWeights(whole->weights)) << "from step " << step;
    EXPECT_EQ(rest->curve.size(), whole->curve.size());
  }
  states[3].so_far.weights.pop_back();
  TrainOptions wrong;
  wrong.resume = &states[3];
  EXPECT_EQ(Train(run, data, plain, wrong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TrainTest, LeavesTheWeightsAloneInSkippedSteps) {
  const digits::Run run = SomeRun("none", 3);
  PlainExchange skipping(false);
  const auto result = Train(run, SmallData(), skipping, TrainOptions());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->skipped_steps, 3);
  EXPECT_EQ(HashWeights(result->weights), HashWeights(Mlp(run.task.model, run.seed).weights()));
}

TEST(ChooseRatesTest, GoesBeyondTheGridWhileItsEndIsBest) {
  const RateSearch search{{1e-5, 2e-5}, {1}, 2};
  int64_t reported = 0;
  const auto choices = ChooseRates({SomeRun("none", 10), SomeRun("signed", 10)}, search, SmallData(),
                                   [&](int64_t done, int64_t planned) {
                                     EXPECT_LE(done, planned);
                                     reported = done;
                                   });
  ASSERT_TRUE(choices.ok()) << choices.status();
  ASSERT_EQ(choices->size(), 2u);
  EXPECT_EQ(reported, 2 * (2 + kMaxGridExtensions));
  for (const RateChoice& choice : *choices) {
    // So small a rate is best doubled again and again.
    EXPECT_EQ(choice.tried.size(), 2u + kMaxGridExtensions);
    EXPECT_EQ(choice.learning_rate, choice.tried.back());
    EXPECT_NEAR(choice.tried.back(), 2e-5 * 16, 1e-12);
    EXPECT_LT(choice.losses.back(), choice.losses.front());
  }
}

TEST(ChooseRatesTest, StaysWithinTheGridWhenItsMiddleIsBest) {
  const RateSearch search{{1e-9, 1e-2, 1e3}, {1, 2}, 1};
  const auto choices = ChooseRates({SomeRun("none", 20)}, search, SmallData(), nullptr);
  ASSERT_TRUE(choices.ok()) << choices.status();
  EXPECT_EQ(choices->front().learning_rate, 1e-2);
  EXPECT_EQ(choices->front().tried.size(), 3u);
}

TEST(ParallelForTest, ReturnsTheFirstFailureByIndex) {
  const absl::Status status = ParallelFor(
      10, 2, [](int64_t i) { return i % 4 == 3 ? absl::InternalError(i == 3 ? "three" : "seven") : absl::OkStatus(); });
  EXPECT_EQ(status.message(), "three");
}

}  // namespace
}  // namespace precondor::digits
