// SPDX-License-Identifier: Apache-2.0
// Sessions whose workers have the factors themselves: what a PULL and a FETCH are answered with.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "server/core/resources/reservation.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ShardPullTest : public ShardFixture {
 protected:
  ShardPullTest() {
    spec.exchange = ExchangeMode::kReplay;
    spec.statistics = StatisticsKind::kPerWorkerMean;
  }
  ContributionHeader PullHeader(uint64_t step, uint32_t rank) const {
    return Header(ContributionKind::kPull, step, rank);
  }
  std::shared_ptr<Reply> Pull(uint64_t step, uint32_t rank) { return Send(PullHeader(step, rank), {}); }
  GradientResult Fetch(uint32_t rank) {
    std::optional<absl::StatusOr<GradientResult>> fetched;
    shard->data_plane().Fetch(Header(ContributionKind::kPull, 0, rank).key,
                              [&](absl::StatusOr<GradientResult> result) { fetched = std::move(result); });
    EXPECT_TRUE(fetched.has_value() && fetched->ok()) << fetched->status();
    return **fetched;
  }
  // Another process has rank 1, in a new epoch before which the shard is fenced.
  void ReplaceRankOne(uint64_t first_step) {
    const auto gone = shard->Fence(
        {.session_id = kSession, .epoch = epoch + 1, .members = {{0, Holder(0), 0}, {1, Holder(1) + 1, first_step}}});
    ASSERT_TRUE(gone.ok() && !gone->has_value()) << gone.status();
    Replace({1}, first_step);
  }
  // Both ranks' statistics and pulls; the answer, which is equal for both.
  GradientResult Step(uint64_t step) {
    for (uint32_t rank : {0u, 1u}) EXPECT_TRUE(Statistics(step, rank, 1.0f + rank)->accepted());
    return Pulled(step);
  }
  GradientResult Pulled(uint64_t step) {
    const std::shared_ptr<Reply> first = Pull(step, 0);
    EXPECT_FALSE(first->answered()) << "rank 1 has not asked yet";
    const std::shared_ptr<Reply> second = Pull(step, 1);
    EXPECT_EQ(first->answer().bytes, second->answer().bytes);
    return second->answer();
  }
  static std::vector<float> Floats(const GradientResult& result) {
    std::vector<float> out(result.bytes->size() / sizeof(float));
    DecodeElements(DType::kF32, result.bytes->data(), 1.0f, absl::MakeSpan(out));
    return out;
  }
  // That FakeLayerState has after `version` updates.
  std::string StateOf(uint64_t version) const {
    StateWriter out("fake");
    out.Integer(version);
    return out.Finish();
  }
  static std::string Text(const GradientResult& result) {
    return std::string(result.bytes->begin(), result.bytes->end());
  }
};

TEST_F(ShardPullTest, ReplayGivesTheMergedVectors) {
  Start();
  const GradientResult result = Step(0);
  EXPECT_EQ(result.decision, Decision::kPreconditioned);
  EXPECT_EQ(result.factor_version, 1u);
  ASSERT_EQ(result.tensors.size(), 2u);
  EXPECT_THAT(result.tensors[0].dims, ElementsAre(2, 3));
  EXPECT_THAT(result.tensors[1].dims, ElementsAre(2, 2));
  const FakeUpdate update = log->updates().back();
  std::vector<float> applied = update.a;
  applied.insert(applied.end(), update.g.begin(), update.g.end());
  EXPECT_EQ(Floats(result), applied);
  const std::shared_ptr<Reply> again = Pull(0, 1);
  EXPECT_TRUE(again->duplicate());
  EXPECT_EQ(again->answer().bytes, result.bytes);
  EXPECT_EQ(Step(1).factor_version, 2u);
  EXPECT_EQ(Step(40).factor_version, 3u) << "statistic steps may lie any distance apart";
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardPullTest, PullFactorsGivesTheFactors) {
  spec.exchange = ExchangeMode::kPullFactors;
  Start();
  for (uint64_t step = 0; step < 3; ++step) {
    const GradientResult result = Step(step);
    EXPECT_EQ(result.decision, Decision::kPreconditioned);
    EXPECT_EQ(result.factor_version, step + 1);
    EXPECT_TRUE(result.tensors.empty());
    EXPECT_EQ(Text(result), StateOf(step + 1));
  }
}

TEST_F(ShardPullTest, AStepThatChangesNothingSaysSo) {
  Start();
  Step(0);
  for (uint32_t rank : {0u, 1u}) Abstain(ContributionKind::kStatistics, 1, rank);
  GradientResult nothing = Pulled(1);
  EXPECT_EQ(nothing.decision, Decision::kIdentity);
  EXPECT_EQ(nothing.factor_version, 1u);
  EXPECT_EQ(nothing.bytes, nullptr);
  log->set_fail_updates(true);
  nothing = Step(2);
  EXPECT_EQ(nothing.decision, Decision::kIdentity);
  EXPECT_EQ(nothing.factor_version, 1u);
}

TEST_F(ShardPullTest, WhoeverBeginsFetchesTheFactorsAsTheyAre) {
  Start();
  EXPECT_EQ(Text(Fetch(0)), StateOf(0));
  Step(0);
  Step(1);
  const GradientResult fetched = Fetch(1);
  EXPECT_EQ(fetched.decision, Decision::kPreconditioned);
  EXPECT_EQ(fetched.factor_version, 2u);
  EXPECT_EQ(Text(fetched), StateOf(2));
  EXPECT_EQ(Fetch(0).bytes, fetched.bytes) << "saved once for all";
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardPullTest, AShardThatComesBackGivesTheSameAgain) {
  MemoryJournal journal;
  options.journal = &journal;
  Start();
  Step(0);
  const std::vector<float> vectors = Floats(Step(1));
  ComeBack(journal);
  EXPECT_EQ(Text(Fetch(0)), StateOf(2)) << "with the updates of the window";
  const GradientResult again = Pulled(1);
  EXPECT_EQ(again.factor_version, 2u);
  EXPECT_EQ(Floats(again), vectors);
  EXPECT_EQ(Step(2).factor_version, 3u);
}

// The image has the step's update, and no process has its vectors.
TEST_F(ShardPullTest, FactorsStandForVectorsThatASnapshotHasTakenIn) {
  MemoryJournal journal;
  options.journal = &journal;
  options.snapshot_interval_steps = 2;
  spec.layers.pop_back();
  Start();
  Step(0);
  Step(1);
  Statistics(2, 0, 1);
  Statistics(2, 1, 2);  // whose update comes after the cut
  ASSERT_EQ(journal.snapshots(), 1);
  ComeBack(journal);
  const GradientResult again = Pulled(1);
  EXPECT_EQ(again.decision, Decision::kPreconditioned);
  EXPECT_TRUE(again.tensors.empty());
  EXPECT_EQ(again.factor_version, 2u);
  EXPECT_EQ(Text(again), StateOf(2));
  const GradientResult next = Pulled(2);
  EXPECT_EQ(next.tensors.size(), 2u);
  EXPECT_EQ(next.factor_version, 3u);
}

TEST_F(ShardPullTest, AProcessThatBeginsBeforeASealedStepIsTooLate) {
  spec.inv_freq = 10;
  Start();
  Step(10);
  for (const auto& [first_step, too_late] :
       std::vector<std::pair<uint64_t, bool>>{{9, true}, {10, false}, {17, false}}) {
    Start();
    Step(10);
    const EpochFence fence{.session_id = kSession, .epoch = 2, .members = {{0, 1, 0}, {1, 2, first_step}}};
    EXPECT_EQ(shard->Fence(fence)->has_value(), too_late) << first_step;
  }
}

// A new process of rank 1, which begins there.
TEST_F(ShardPullTest, FactorsWaitForAProcessThatBeginsAgainBeforeTheStep) {
  Start();
  Step(0);
  EXPECT_TRUE(Statistics(1, 1, 1)->accepted());
  ReplaceRankOne(/*first_step=*/0);
  EXPECT_TRUE(Statistics(1, 0, 2)->accepted());
  const std::shared_ptr<Reply> ahead = Pull(1, 0);
  // Step 1 has the statistics of all ranks; the new process is to repeat step 0 with the factors of then.
  EXPECT_EQ(Fetch(1).factor_version, 1u);
  EXPECT_EQ(Pull(0, 1)->version(), 1u);
  EXPECT_EQ(Fetch(1).factor_version, 1u);
  EXPECT_FALSE(ahead->answered());
  EXPECT_TRUE(Statistics(1, 1, 1)->duplicate());
  EXPECT_EQ(Pull(1, 1)->version(), 2u);
  EXPECT_EQ(ahead->version(), 2u);
}

TEST_F(ShardPullTest, NobodyWaitsForThePullOfARankThatBeginsLater) {
  MemoryJournal journal;
  options.journal = &journal;
  Start();
  Step(0);
  ReplaceRankOne(/*first_step=*/1);
  ComeBack(journal);  // the new one does not know who had asked for step 0
  const std::shared_ptr<Reply> waiting = Pull(0, 0);
  EXPECT_FALSE(waiting->answered()) << "rank 1 may be told to begin earlier";
  EXPECT_EQ(Fetch(1).factor_version, 1u);
  EXPECT_EQ(waiting->version(), 1u);
  EXPECT_EQ(Step(1).factor_version, 2u);
  EXPECT_EQ(shard->in_flight(), 0);
}

// The first rank that comes back has opened a step so late that the window is past the other's answer.
TEST_F(ShardPullTest, ALossIsNoticedBehindTheWindowToo) {
  Start();
  for (const uint64_t step : {0, 1, 2}) Step(step);
  Start();  // with nothing
  EXPECT_TRUE(Statistics(9, 0, 1)->accepted());
  const ContributionKey key = PullHeader(2, 1).key;
  EXPECT_EQ(GetErrorReason(shard->data_plane().Resume({.key = key, .factor_version = 3}).status()),
            ErrorReason::kStateLost);
  Start();
  EXPECT_TRUE(Statistics(9, 0, 1)->accepted());
  EXPECT_TRUE(Statistics(9, 1, 1)->accepted());
  EXPECT_TRUE(shard->data_plane().Resume({.key = key, .factor_version = 3}).ok())
      << "from a stream that broke long ago";
}

TEST_F(ShardPullTest, RefusesWhatDoesNotBelongToTheMode) {
  spec.inv_freq = 2;
  spec.layer_methods = {
      {.method = {.name = "none", .options = {}}, .statistics = StatisticsKind::kMean, .layers = {1}}};
  options.make_method = [this](const MethodConfig& config) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<FakeMethod>(log, /*needs_statistics=*/config.name != "none");
  };
  Start();
  const auto expect = [&](const ContributionHeader& header, ErrorReason reason, const std::string& text) {
    EXPECT_THAT(Admission(header, 0), ReasonIs(reason, HasSubstr(text)));
  };
  expect(Header(ContributionKind::kGradient, 0, 0), ErrorReason::kMalformed, "expected PULL with exchange REPLAY");
  expect(PullHeader(1, 0), ErrorReason::kNotStatisticStep, "expected a statistic step");
  ContributionHeader bad = PullHeader(0, 0);
  bad.mode = Mode::kFirstOrder;
  expect(bad, ErrorReason::kNotStatisticStep, "in second order");
  bad = PullHeader(0, 0);
  bad.key.layer = 1;
  expect(bad, ErrorReason::kNotStatisticStep, "of a layer that takes statistics");
  bad = PullHeader(0, 0);
  bad.abstain = true;
  expect(bad, ErrorReason::kMalformed, "a PULL cannot be an abstention");
  EXPECT_EQ(GetErrorReason(Admission(PullHeader(0, 0), 8)), ErrorReason::kSizeMismatch);
  EXPECT_TRUE(Admission(PullHeader(0, 0), 0).ok());
  spec.exchange = ExchangeMode::kDirect;
  Start();
  expect(PullHeader(0, 0), ErrorReason::kMalformed, "expected GRADIENT with exchange DIRECT");
}

TEST_F(ShardPullTest, ReservesNoGradients) {
  const MethodSet methods = *MethodSet::Make(spec, options.make_method);
  const auto reserved = [&](ExchangeMode exchange) {
    SessionSpec with = spec;
    with.exchange = exchange;
    return ComputeReservation(with, methods, {0, 1}, /*window_steps=*/2, /*parallelism=*/2);
  };
  const Reservation direct = reserved(ExchangeMode::kDirect), replay = reserved(ExchangeMode::kReplay);
  EXPECT_EQ(replay.states, direct.states);
  // D and U of 6 elements on the device, for each thread.
  EXPECT_EQ(direct.scratch - replay.scratch, 2 * 2 * 6 * 4);
  // Per layer: two ranks' gradients and an f64 sum for two steps go; two steps' vectors of two ranks, and two saved
  // states of 5 floats, come.
  const int64_t saved = 20 + 20 / 8 + (16 << 10);
  EXPECT_EQ(direct.staging - replay.staging, 2 * (2 * (2 * 6 * 4 + 6 * 8) - 2 * 2 * 5 * 4 - 2 * saved));
  EXPECT_EQ(reserved(ExchangeMode::kPullFactors).staging - replay.staging, 2 * (2 * saved - 2 * 2 * 5 * 4));
}

}  // namespace
}  // namespace precondor
