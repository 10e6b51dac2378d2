// SPDX-License-Identifier: Apache-2.0
// The fate of contributions: order, decisions, repetitions, the window.
#include "tests/support/faulty_backend.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

using ShardPipelineTest = ShardFixture;

TEST_F(ShardPipelineTest, GradientsAreAveragedBySamplesAndPreconditioned) {
  Start();
  AllStatistics(0);
  const auto first = Gradient(0, 0, 1.0f, 1);
  EXPECT_TRUE(first->accepted());
  EXPECT_FALSE(first->answered());
  const auto second = Gradient(0, 1, 5.0f, 3);
  // (1 * 1 + 3 * 5) / 4 = 4, times version + 1 = 2.
  EXPECT_THAT(first->values(), Each(FloatEq(8.0f)));
  EXPECT_EQ(first->decision(), Decision::kPreconditioned);
  EXPECT_EQ(first->version(), 1u);
  EXPECT_EQ(first->answer().bytes, second->answer().bytes);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardPipelineTest, ResultIsBitwiseTheSameForAnyOrderOfArrival) {
  spec.world_size = 4;
  std::vector<std::vector<float>> answers;
  const std::vector<std::vector<uint32_t>> orders = {{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}};
  for (const std::vector<uint32_t>& order : orders) {
    Start();
    for (uint32_t rank : order) Statistics(0, rank, 0.1f * static_cast<float>(rank + 1), rank + 1);
    std::shared_ptr<Reply> reply;
    for (uint32_t rank : order) reply = Gradient(0, rank, 0.1f + 1e7f * static_cast<float>(rank % 2), rank + 1);
    answers.push_back(reply->values());
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_EQ(answers[0], answers[2]);
  EXPECT_EQ(log->updates()[0].a, log->updates()[1].a);
  EXPECT_EQ(log->updates()[0].g, log->updates()[2].g);
}

TEST_F(ShardPipelineTest, SignedVectorsAreStackedInRankOrderAndWeighted) {
  Start();
  Statistics(0, 1, 1.0f, 3);
  Statistics(0, 0, 1.0f, 1);
  const std::vector<FakeUpdate> updates = log->updates();
  ASSERT_EQ(updates.size(), 1u);
  EXPECT_EQ(updates[0].k, 2);
  // sqrt(W n_r / N): sqrt(2 / 4) and sqrt(6 / 4).
  const float low = std::sqrt(0.5f);
  const float high = std::sqrt(1.5f);
  EXPECT_THAT(updates[0].a,
              ElementsAre(FloatEq(low), FloatEq(low), FloatEq(low), FloatEq(high), FloatEq(high), FloatEq(high)));
}

TEST_F(ShardPipelineTest, MeansAreAveragedIntoOneVector) {
  spec.statistics = StatisticsKind::kMean;
  Start();
  Statistics(0, 0, 1.0f, 1);
  Statistics(0, 1, 5.0f, 3);
  ASSERT_EQ(log->updates().size(), 1u);
  EXPECT_EQ(log->updates()[0].k, 1);
  EXPECT_THAT(log->updates()[0].a, ElementsAre(4.0f, 4.0f, 4.0f));
}

TEST_F(ShardPipelineTest, GradientWaitsForItsStepsStatistics) {
  Start();
  const auto reply = Gradients(0, {1, 1});
  Statistics(0, 0, 1);
  EXPECT_FALSE(reply->answered());
  Statistics(0, 1, 1);
  EXPECT_EQ(reply->version(), 1u);
}

TEST_F(ShardPipelineTest, NextStepsUpdateWaitsForThisStepsGradient) {
  Start();
  AllStatistics(0);
  AllStatistics(1);
  EXPECT_EQ(log->updates().size(), 1u);
  EXPECT_EQ(Gradients(0, {1, 1})->version(), 1u);
  EXPECT_EQ(log->updates().size(), 2u);
}

TEST_F(ShardPipelineTest, StepsWithoutStatisticsUseTheCurrentFactors) {
  spec.inv_freq = 3;
  Start();
  AllStatistics(3);
  for (uint64_t step = 3; step < 6; ++step) EXPECT_EQ(Gradients(step, {1, 1})->version(), 1u) << step;
}

TEST_F(ShardPipelineTest, WithoutFactorsTheAverageComesBack) {
  spec.inv_freq = 10;
  Start();
  const auto reply = Gradients(1, {2, 4});
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_THAT(reply->answer().reason, HasSubstr("no factors yet"));
  EXPECT_THAT(reply->values(), Each(FloatEq(3.0f)));
}

TEST_F(ShardPipelineTest, FailedUpdateKeepsTheLastGoodFactors) {
  Start();
  SendStep(0);
  log->set_fail_updates(true);
  const auto reply = SendStep(1)[1];
  EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
  EXPECT_EQ(reply->version(), 1u);
  EXPECT_EQ(shard->in_flight(), 0);
}

// Each request takes memory, and a rank can send its gradient any number of times before the others are there.
TEST_F(ShardPipelineTest, ARankThatAsksWithoutEndHasFourRequestsThatWait) {
  Start();
  AllStatistics(0);
  std::vector<std::shared_ptr<Reply>> replies;
  for (int i = 0; i < 100; ++i) replies.push_back(Gradient(0, 0, 1));
  for (int i = 0; i < 96; ++i) {
    EXPECT_THAT(replies[i]->outcome(),
                ReasonIs(ErrorReason::kCapacity, HasSubstr("expected at most 4 requests of a rank")));
  }
  const auto other = Gradient(0, 1, 3);
  for (int i = 96; i < 100; ++i) EXPECT_EQ(replies[i]->values(), other->values()) << i;
}

TEST_F(ShardPipelineTest, NonFiniteResultBecomesIdentityWithTheAverage) {
  Start();
  log->set_poison_results(true);
  AllStatistics(0);
  const auto reply = Gradients(0, {1, 3});
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_THAT(reply->answer().reason, HasSubstr("not finite"));
  EXPECT_THAT(reply->values(), Each(FloatEq(2.0f)));
}

class ShardFaultTest : public ShardFixture {
 protected:
  ShardFaultTest() : cpu_(std::move(backend)) {
    auto made = std::make_unique<FaultyBackend>(*cpu_);
    faulty = made.get();
    backend = std::move(made);
  }
  ~ShardFaultTest() override {
    shard.reset();
    backend.reset();
  }
  FaultyBackend* faulty;

 private:
  const std::unique_ptr<Backend> cpu_;
};

TEST_F(ShardFaultTest, NobodyGetsWhatADeviceFaultLeftForTheAverage) {
  Start();
  log->set_poison_results(true);
  bool failed = true;
  // Each operation of a step fails in its turn.
  for (uint64_t step = 0; failed; ++step) {
    SCOPED_TRACE(step);
    AllStatistics(step);
    faulty->FailAt(static_cast<int64_t>(step));
    const auto reply = Gradients(step, {1, 3});
    failed = faulty->failed();
    faulty->NeverFail();
    if (reply->decision() == Decision::kSkip) {
      EXPECT_THAT(reply->answer().reason, HasSubstr("did not come back"));
      EXPECT_EQ(reply->answer().bytes, nullptr);
    } else {
      EXPECT_EQ(reply->decision(), Decision::kIdentity);
      EXPECT_THAT(reply->values(), Each(FloatEq(2.0f)));
    }
  }
  EXPECT_EQ(StatsOf(0).skipped, 1u);  // the last operation that can fail gives the average back
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardPipelineTest, AverageOfTheLargestFloatsIsFinite) {
  Start();
  AllStatistics(0);
  const float huge = std::numeric_limits<float>::max();
  Gradient(0, 0, huge, 1);
  const auto reply = Gradient(0, 1, huge, 3);
  // Twice the largest float overflows: the method's answer is refused, the average is not.
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_THAT(reply->values(), Each(FloatEq(huge)));
}

TEST_F(ShardPipelineTest, AbstentionSkipsForEverybodyAndNamesTheRank) {
  Start();
  AllStatistics(0);
  const auto first = Gradient(0, 0, 1);
  const auto second = Abstain(ContributionKind::kGradient, 0, 1);
  EXPECT_EQ(first->decision(), Decision::kSkip);
  EXPECT_EQ(second->decision(), Decision::kSkip);
  EXPECT_EQ(first->answer().bytes, nullptr);
  EXPECT_THAT(first->answer().reason, HasSubstr("rank 1 abstained"));
}

TEST_F(ShardPipelineTest, NonFiniteGradientIsRefusedAndSkipsTheStep) {
  Start();
  AllStatistics(0);
  const auto bad = Gradient(0, 0, std::nanf(""));
  EXPECT_THAT(bad->ack->status(), StatusIs(absl::StatusCode::kInvalidArgument, ErrorReason::kNonFinite));
  const auto good = Gradient(0, 1, 1);
  EXPECT_EQ(good->decision(), Decision::kSkip);
  EXPECT_THAT(good->answer().reason, HasSubstr("rank 0"));
  EXPECT_FALSE(bad->answered());
  // Asking again, with the same bytes or as the abstention that it counts as, tells what became of the step.
  const auto again = Gradient(0, 0, std::nanf(""));
  EXPECT_TRUE(again->duplicate());
  EXPECT_EQ(again->decision(), Decision::kSkip);
  const auto abstained = Abstain(ContributionKind::kGradient, 0, 0);
  EXPECT_TRUE(abstained->duplicate());
  EXPECT_EQ(abstained->decision(), Decision::kSkip);
  EXPECT_EQ(Gradient(0, 0, 1)->reason(), ErrorReason::kConflict);
}

TEST_F(ShardPipelineTest, NonFiniteStatisticsCountAsAbstention) {
  Start();
  const auto bad = Statistics(0, 0, std::numeric_limits<float>::infinity());
  EXPECT_EQ(bad->reason(), ErrorReason::kNonFinite);
  EXPECT_TRUE(Statistics(0, 1, 2)->accepted());
  ASSERT_EQ(log->updates().size(), 1u);
  EXPECT_EQ(log->updates()[0].k, 1);
  EXPECT_THAT(log->updates()[0].a, Each(FloatEq(2.0f)));
  EXPECT_EQ(Statistics(0, 0, std::numeric_limits<float>::infinity())->reason(), ErrorReason::kNonFinite);
}

TEST_F(ShardPipelineTest, OverNormStatisticsAreRefused) {
  options.max_norm_per_sqrt_element = 10;
  Start();
  EXPECT_TRUE(Statistics(0, 0, 9.9f)->accepted());
  EXPECT_EQ(Statistics(0, 1, 10.1f)->reason(), ErrorReason::kOverNorm);
  ASSERT_EQ(log->updates().size(), 1u);
  EXPECT_EQ(log->updates()[0].k, 1);
}

TEST_F(ShardPipelineTest, UpdateIsSkippedWhenNobodyVotes) {
  Start();
  Abstain(ContributionKind::kStatistics, 0, 0);
  Abstain(ContributionKind::kStatistics, 0, 1);
  EXPECT_EQ(Gradients(0, {1, 1})->decision(), Decision::kIdentity);
  EXPECT_TRUE(log->updates().empty());
}

TEST_F(ShardPipelineTest, RepetitionIsAcknowledgedCountedOnceAndGetsTheSameBytes) {
  Start();
  Statistics(0, 0, 1);
  EXPECT_TRUE(Statistics(0, 0, 1)->duplicate());
  Statistics(0, 1, 1);
  Gradient(0, 0, 1);
  const auto waiting = Gradient(0, 0, 1);
  EXPECT_TRUE(waiting->duplicate());
  const auto last = Gradient(0, 1, 3);
  ASSERT_TRUE(waiting->answered());
  const auto late = Gradient(0, 0, 1);
  EXPECT_TRUE(late->duplicate());
  EXPECT_EQ(late->answer().bytes, last->answer().bytes);
  EXPECT_THAT(late->values(), Each(FloatEq(4.0f)));
  const LayerStats stats = StatsOf(0);
  EXPECT_EQ(stats.accepted, 4u);
  EXPECT_EQ(stats.duplicates, 3u);
  EXPECT_EQ(stats.preconditioned, 1u);
  EXPECT_EQ(stats.factor_version, 1u);
}

TEST_F(ShardPipelineTest, OtherBytesUnderTheSameKeyAreAConflict) {
  Start();
  Statistics(0, 0, 1);
  EXPECT_EQ(Statistics(0, 0, 2)->reason(), ErrorReason::kConflict);
  EXPECT_EQ(Statistics(0, 0, 1, /*samples=*/2)->reason(), ErrorReason::kConflict);
  EXPECT_EQ(Statistics(0, 0, 2)->ack->status().code(), absl::StatusCode::kAborted);
  Gradient(0, 0, 1);
  EXPECT_EQ(Abstain(ContributionKind::kGradient, 0, 0)->reason(), ErrorReason::kConflict);
}

TEST_F(ShardPipelineTest, WindowRefusesStepsTooFarAheadAndRetiredOnes) {
  spec.inv_freq = 1000;
  Start();
  Gradient(5, 0, 1);
  EXPECT_TRUE(Gradient(6, 0, 1)->accepted());
  EXPECT_EQ(Gradient(7, 0, 1)->reason(), ErrorReason::kStepTooFarAhead);
  EXPECT_EQ(Gradient(1'000'000, 0, 1)->reason(), ErrorReason::kStepTooFarAhead);
  EXPECT_EQ(Gradient(3, 0, 1)->reason(), ErrorReason::kStaleStep);
  Gradient(5, 1, 1);
  EXPECT_TRUE(Gradient(7, 0, 1)->accepted());
  EXPECT_EQ(Gradient(5, 1, 1)->reason(), ErrorReason::kStaleStep);
}

TEST_F(ShardPipelineTest, StatisticsAloneAdvanceWithoutGradients) {
  Start();
  for (uint64_t step = 0; step < 10; ++step) {
    EXPECT_TRUE(Statistics(step, 0, 1)->accepted()) << step;
    EXPECT_TRUE(Statistics(step, 1, 1)->accepted()) << step;
  }
  // The last one still waits for a gradient of the step before.
  EXPECT_EQ(log->updates().size(), 9u);
}

TEST_F(ShardPipelineTest, DelegateAloneSendsTheGradient) {
  spec.exchange = ExchangeMode::kDelegate;
  Start();
  AllStatistics(0);
  EXPECT_EQ(Gradient(0, 1, 1)->reason(), ErrorReason::kNotDelegate);
  EXPECT_THAT(Gradient(0, 0, 1.5f, 77)->values(), Each(FloatEq(3.0f)));
}

TEST_F(ShardPipelineTest, SixteenBitGradientsKeepTheirTypeAndScale) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    spec.gradient_dtype = dtype;
    Start();
    AllStatistics(0);
    const auto reply = Gradients(0, {1, 2});
    ASSERT_TRUE(reply->outcome().ok());
    EXPECT_EQ(reply->answer().tensors[0].dtype, dtype);
    EXPECT_THAT(reply->answer().tensors[0].dims, ElementsAre(2, 3));
    EXPECT_EQ(reply->answer().bytes->size(), 12u);
    EXPECT_THAT(reply->values(), Each(FloatEq(3.0f)));
  }
}

TEST_F(ShardPipelineTest, ScaledF32GradientIsRead) {
  spec.world_size = 1;
  Start();
  Statistics(0, 0, 1);
  ContributionHeader header = Header(ContributionKind::kGradient, 0, 0);
  header.tensors[0].scale = 4;
  const auto reply = Send(header, EncodeValues(DType::kF32, std::vector<float>(6, 2.0f)));
  ASSERT_THAT(reply->values(), Each(FloatEq(16.0f)));
  EXPECT_EQ(reply->answer().tensors[0].scale, 1.0f);
}

TEST_F(ShardPipelineTest, MethodsWithoutStatisticsIgnoreThem) {
  needs_statistics = false;
  Start();
  EXPECT_TRUE(Statistics(0, 0, 1)->accepted());
  EXPECT_EQ(Gradients(0, {1, 1})->decision(), Decision::kPreconditioned);
  EXPECT_TRUE(log->updates().empty());
}

}  // namespace
}  // namespace precondor
