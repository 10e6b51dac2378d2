// SPDX-License-Identifier: Apache-2.0
// The mode of a step on a shard: who fixes it, what is taken in, what is answered.
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::Each;
using ::testing::FloatEq;
using ::testing::HasSubstr;

class ShardModeTest : public ShardFixture {
 protected:
  std::shared_ptr<Reply> FirstOrderGradient(uint64_t step, uint32_t rank, float value, uint64_t samples = 1) {
    ContributionHeader header = Header(ContributionKind::kGradient, step, rank);
    header.mode = Mode::kFirstOrder;
    return SendFilled(header, value, samples);
  }
  void SecondOrderStep(uint64_t step, uint64_t version = 1) {
    AllStatistics(step);
    const auto reply = Gradients(step, {1, 1});
    EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
    EXPECT_EQ(reply->version(), version);
  }
};

TEST_F(ShardModeTest, FirstOrderAnswersTheAverageAndNeedsNoStatistics) {
  Start();
  SecondOrderStep(0);
  const auto first = FirstOrderGradient(1, 0, 1.0f, 1);
  const auto second = FirstOrderGradient(1, 1, 5.0f, 3);
  EXPECT_EQ(first->decision(), Decision::kIdentity);
  EXPECT_EQ(first->answer().reason, "first order");
  EXPECT_THAT(second->values(), Each(FloatEq((1 * 1 + 3 * 5) / 4.0f)));
  EXPECT_EQ(log->updates().size(), 1u);
  EXPECT_EQ(shard->in_flight(), 0);
  EXPECT_EQ(shard->ListSessions()[0].last_step, 1u);
  EXPECT_EQ(shard->ListSessions()[0].mode, Mode::kFirstOrder);
}

// The last snapshot is of before first order, of its steps, or of the step after them.
TEST_F(ShardModeTest, FactorsGoOnAfterFirstOrderAlsoWhereTheShardWasLost) {
  for (const uint64_t interval : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(interval);
    MemoryJournal journal;
    spec.layers.resize(1);
    options.journal = &journal;
    options.snapshot_interval_steps = interval;
    shard.reset();
    Start();
    const int64_t reserved = shard->memory()->reserved();
    for (uint64_t step = 0; step < 6; ++step) {
      if (step == 2 || step == 3) {
        FirstOrderGradient(step, 0, 1);
        EXPECT_EQ(FirstOrderGradient(step, 1, 3)->decision(), Decision::kIdentity);
      } else {
        SecondOrderStep(step, step < 2 ? step + 1 : step - 1);
      }
      ComeBack(journal);
      EXPECT_EQ(shard->memory()->reserved(), reserved);
    }
  }
}

TEST_F(ShardModeTest, FirstOrderTakesNoStatistics) {
  Start();
  ContributionHeader header = Header(ContributionKind::kStatistics, 0, 0);
  header.mode = Mode::kFirstOrder;
  const auto reply = Send(header, Filled(header, 1));
  EXPECT_EQ(reply->ack->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(reply->reason(), ErrorReason::kNotStatisticStep);
  EXPECT_THAT(std::string(reply->ack->status().message()), HasSubstr("first order"));
  EXPECT_EQ(StatsOf(0).rejected, 1u);
  SecondOrderStep(0);  // it has fixed nothing
}

TEST_F(ShardModeTest, FirstContributionFixesTheModeOfItsStepAndLayer) {
  Start();
  EXPECT_TRUE(Statistics(0, 0, 1)->accepted());
  const auto conflict = FirstOrderGradient(0, 1, 1);
  EXPECT_EQ(conflict->ack->status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(conflict->reason(), ErrorReason::kModeConflict);
  EXPECT_THAT(std::string(conflict->ack->status().message()),
              HasSubstr("expected mode SECOND_ORDER as the step began, got FIRST_ORDER"));
  EXPECT_EQ(StatsOf(0).rejected, 1u);

  EXPECT_TRUE(FirstOrderGradient(1, 0, 1)->accepted());
  EXPECT_EQ(Gradient(1, 1, 1)->reason(), ErrorReason::kModeConflict);
  EXPECT_EQ(Statistics(1, 1, 1)->reason(), ErrorReason::kModeConflict);
  // A refused contribution leaves no trace: both steps end as they began.
  EXPECT_TRUE(Statistics(0, 1, 1)->accepted());
  EXPECT_EQ(Gradients(0, {1, 1})->decision(), Decision::kPreconditioned);
  EXPECT_EQ(FirstOrderGradient(1, 1, 1)->decision(), Decision::kIdentity);
}

TEST_F(ShardModeTest, ModeConflictIsFoundBeforeThePayloadCame) {
  Start();
  Statistics(0, 0, 1);
  ContributionHeader header = Header(ContributionKind::kGradient, 0, 1);
  header.mode = Mode::kFirstOrder;
  EXPECT_EQ(GetErrorReason(Admission(header, 24)), ErrorReason::kModeConflict);
  header.key.layer = 1;
  header.tensors[0].dims = {3, 2};
  EXPECT_TRUE(Admission(header, 24).ok()) << "each layer has its own";
}

TEST_F(ShardModeTest, GradientsInFirstOrderSkipAndRepeatLikeOthers) {
  Start();
  FirstOrderGradient(0, 0, 1);
  EXPECT_TRUE(FirstOrderGradient(0, 0, 1)->duplicate());
  EXPECT_EQ(FirstOrderGradient(0, 0, 2)->reason(), ErrorReason::kConflict);
  ContributionHeader abstention = Header(ContributionKind::kGradient, 0, 1);
  abstention.mode = Mode::kFirstOrder;
  abstention.abstain = true;
  abstention.tensors.clear();
  EXPECT_EQ(Send(abstention, {})->decision(), Decision::kSkip);
}

TEST_F(ShardModeTest, DelegateGoesOnAnyDistanceAfterASilentStretch) {
  spec.exchange = ExchangeMode::kDelegate;
  Start();
  EXPECT_EQ(SendStep(0)[0]->decision(), Decision::kPreconditioned);
  // A gradient that comes although none is expected is answered with itself.
  const auto stray = FirstOrderGradient(1, 0, 3);
  EXPECT_EQ(stray->decision(), Decision::kIdentity);
  EXPECT_THAT(stray->values(), Each(FloatEq(3)));
  EXPECT_EQ(SendStep(5000)[0]->decision(), Decision::kPreconditioned);
  // Not over a step that is still open.
  Statistics(5001, 0, 1);
  EXPECT_EQ(Gradient(9000, 0, 1)->reason(), ErrorReason::kStepTooFarAhead);
}

}  // namespace
}  // namespace precondor
