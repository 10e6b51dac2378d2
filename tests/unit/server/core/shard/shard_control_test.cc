// SPDX-License-Identifier: Apache-2.0
// A coordinator's calls to a shard: installing, epochs, capacity, removal.
#include "server/core/resources/reservation.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

using ShardControlTest = ShardFixture;

// By hand, per layer [2, 3] and [3, 2], W = 2, q = 1, f32: states 4 * 5 each; statistics 2 * 5 * 4 bytes * 3 steps;
// gradients (2 * 6 * 4 + 6 * 8) * 2 steps; slots of both kinds for 2 ranks * 3 steps. Scratch of one task: statistics
// 2 * 5 * 4 and on the host as much, D and U 2 * 6 * 4, method 128.
constexpr int64_t kPerLayer = 20 + 120 + 192 + 2 * 2 * 3 * kBytesPerContribution;
constexpr int64_t kNeeded = 2 * kPerLayer + 40 + 40 + 48 + 128 + kTables;

TEST_F(ShardControlTest, ReservesWhatTheFormulaSays) {
  Start();
  EXPECT_EQ(shard->memory()->reserved(), kNeeded);
  EXPECT_EQ(*shard->Install(MakeInstall()), shard->memory()->reserved());
  EXPECT_EQ(shard->Describe()->device.reserved_bytes, shard->memory()->reserved());
}

TEST_F(ShardControlTest, RefusesWhatDoesNotFitWithTheNumbersAndReservesNothing) {
  options.capacity_bytes = kNeeded - 1;
  MakeShard();
  EXPECT_THAT(shard->Install(MakeInstall()),
              StatusIs(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                       HasSubstr(absl::StrCat("needed ", kNeeded, " bytes, reserved 0 of capacity ", kNeeded - 1))));
  EXPECT_EQ(shard->memory()->reserved(), 0);
  EXPECT_TRUE(shard->ListSessions().empty());
}

TEST_F(ShardControlTest, HugeLayersSaturateInsteadOfOverflowing) {
  spec.world_size = kMaxWorldSize;
  spec.layers.clear();
  for (int i = 0; i < 1000; ++i) {
    spec.layers.push_back(
        {.name = std::to_string(i), .d_out = kMaxDimension, .d_in = kMaxDimension, .has_bias = false});
  }
  MakeShard();
  EXPECT_THAT(shard->Install(MakeInstall()), ReasonIs(ErrorReason::kCapacity));
}

TEST_F(ShardControlTest, RefusesMalformedInstalls) {
  MakeShard();
  SessionInstall unsorted = MakeInstall(), unknown = unsorted, of_no_rank = unsorted, unnamed = unsorted;
  unsorted.layers = {1, 0};
  unknown.layers = {2};
  of_no_rank.members.push_back({.rank = 2, .incarnation = 1});
  unnamed.session_id = 0;
  for (const SessionInstall& install : {unsorted, unknown, of_no_rank, unnamed}) {
    EXPECT_THAT(shard->Install(install), StatusIs(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_EQ(shard->memory()->reserved(), 0);
}

TEST_F(ShardControlTest, JobThatGoesBackDropsOpenSlotsAndKeepsFactors) {
  Start();
  AllStatistics(0);
  const auto waiting = Gradient(0, 0, 1);
  Replace({0}, 0, /*rollback_step=*/0);
  EXPECT_THAT(waiting->outcome(), StatusIs(absl::StatusCode::kAborted, ErrorReason::kStaleEpoch));
  EXPECT_EQ(shard->in_flight(), 0);
  // Nothing of the first epoch counts: both ranks have to come again, with whatever they have now.
  Abstain(ContributionKind::kStatistics, 0, 0);
  Abstain(ContributionKind::kStatistics, 0, 1);
  const auto reply = Gradients(0, {3, 3});
  EXPECT_EQ(reply->version(), 1u);
  EXPECT_THAT(reply->values(), ::testing::Each(::testing::FloatEq(6.0f)));
}

// Another shard has died before it had the epoch, and lacks a step of its members.
TEST_F(ShardControlTest, AJobCanGoBackInAnEpochThatTheShardHas) {
  Start();
  AllStatistics(0);
  Gradients(0, {1, 1});
  Replace({0, 1}, 1);
  EXPECT_TRUE(Statistics(1, 0, 1)->accepted());
  last_rollback = {.epoch = epoch, .step = 0};
  for (int repetition = 0; repetition < 2; ++repetition) {
    ASSERT_TRUE(shard->Install(MakeInstall(epoch)).ok());
    EXPECT_EQ(shard->Describe()->sessions[0].epoch, epoch);
  }
  for (uint32_t rank : {0u, 1u}) EXPECT_TRUE(Statistics(0, rank, 7)->accepted()) << "other bytes than before";
  EXPECT_EQ(Gradients(0, {3, 3})->version(), 2u);
}

TEST_F(ShardControlTest, FenceEndsTheEpochAndTellsWhetherTheStepsAreKept) {
  spec.inv_freq = 1000;
  options.window_steps = 2;
  Start();
  for (uint64_t step = 50; step < 53; ++step) Gradients(step, {1, 1});
  const auto waiting = Gradient(53, 0, 1);
  EpochFence fence{.session_id = kSession, .epoch = 2, .members = {{0, 1, 0}, {1, 2, 52}}};
  EXPECT_EQ(*shard->Fence(fence), std::nullopt) << "rank 0 is who it was, wherever it began";
  EXPECT_EQ(GetErrorReason(waiting->outcome()), ErrorReason::kStaleEpoch);
  EXPECT_EQ(Gradient(53, 1, 1)->reason(), ErrorReason::kStaleEpoch);
  ContributionHeader next = Header(ContributionKind::kGradient, 53, 0);
  next.key.epoch = 2;
  EXPECT_EQ(Send(next, Filled(next, 1))->reason(), ErrorReason::kNotActive) << "until it is installed";
  fence.members[1].first_step = 51;
  EXPECT_EQ(*shard->Fence(fence), 51u) << "steps from 52 on are kept";
  Replace({1}, 52);
  EXPECT_TRUE(Gradient(53, 0, 1)->duplicate());
  EXPECT_EQ(*shard->Fence(fence), std::nullopt) << "it goes on with this epoch already";
  EXPECT_TRUE(Gradient(53, 1, 1)->accepted());
  fence.epoch = 1;
  EXPECT_EQ(GetErrorReason(shard->Fence(fence).status()), ErrorReason::kStaleEpoch);
  fence = {.session_id = kSession, .epoch = 3, .members = {{2, 1, 0}}};
  EXPECT_EQ(GetErrorReason(shard->Fence(fence).status()), ErrorReason::kUnknownRank);
  EXPECT_TRUE(Gradient(53, 0, 1)->accepted()) << "nothing has changed";
  fence.session_id = 8;
  EXPECT_EQ(GetErrorReason(shard->Fence(fence).status()), ErrorReason::kUnknownSession);
}

TEST_F(ShardControlTest, WhatAReplacedRankSentStands) {
  Start();
  AllStatistics(0);
  Gradients(0, {1, 3});
  AllStatistics(1);
  const auto open = Gradient(1, 1, 5);
  Replace({1}, 0);
  EXPECT_EQ(GetErrorReason(open->outcome()), ErrorReason::kStaleEpoch);
  // The new process repeats step 0 with other bytes: it gets the answer that rank 0 got, and nothing counts twice.
  EXPECT_TRUE(Statistics(0, 1, 9)->duplicate());
  const auto repeated = Gradient(0, 1, 9);
  EXPECT_TRUE(repeated->duplicate());
  EXPECT_EQ(repeated->version(), 1u);
  EXPECT_THAT(repeated->values(), ::testing::Each(::testing::FloatEq(4.0f)));
  EXPECT_EQ(Gradient(0, 0, 9)->reason(), ErrorReason::kConflict) << "rank 0 is the same process as before";
  // And the step that was open needs rank 0 alone.
  const auto last = Gradient(1, 0, 1);
  EXPECT_FALSE(last->duplicate());
  EXPECT_EQ(last->version(), 2u);
  EXPECT_THAT(last->values(), ::testing::Each(::testing::FloatEq(9.0f)));
  EXPECT_EQ(log->updates().size(), 2u);
}

TEST_F(ShardControlTest, NoStepRetiresBeforeAReplacedRankHasComePastIt) {
  options.window_steps = 2;
  spec.inv_freq = 1000;
  Start();
  for (uint64_t step = 1; step < 3; ++step) Gradients(step, {1, 3});
  Replace({1}, 1);
  EXPECT_THAT(Gradient(3, 0, 1)->ack->status(), ReasonIs(ErrorReason::kNotActive, HasSubstr("rank 1 begins again")));
  EXPECT_TRUE(Gradient(1, 1, 8)->answered());
  EXPECT_EQ(Gradient(3, 0, 1)->reason(), ErrorReason::kNotActive) << "the answer may be lost on its way";
  EXPECT_TRUE(Gradient(2, 1, 8)->answered());
  EXPECT_TRUE(Gradient(3, 0, 1)->accepted());
}

TEST_F(ShardControlTest, ReplacedRanksDoNotWaitForEachOtherAfterAStretchWithoutFrames) {
  options.window_steps = 2;
  spec.inv_freq = 5;
  spec.exchange = ExchangeMode::kDelegate;
  Start();
  SendStep(0);
  Replace({0, 1}, 0);
  EXPECT_TRUE(Statistics(0, 0, 1)->duplicate());
  EXPECT_TRUE(Statistics(0, 1, 1)->duplicate());
  EXPECT_TRUE(Gradient(0, 0, 1)->answered());
  // Steps 1 to 4 are in first order, in which no rank sends. That rank 0 comes here shows that it has its answer.
  const ContributionHeader header = Header(ContributionKind::kGradient, 5, 0);
  EXPECT_TRUE(Admission(header, Filled(header, 1).size()).ok()) << "or it would never get to say so";
  EXPECT_TRUE(Gradient(5, 0, 1)->accepted());
  EXPECT_TRUE(Statistics(5, 0, 1)->accepted());
  EXPECT_TRUE(Statistics(5, 1, 1)->accepted());
}

TEST_F(ShardControlTest, StatisticsOfALaterStepShowThatAReplacedRankHasItsAnswer) {
  options.window_steps = 2;
  spec.inv_freq = 5;
  spec.exchange = ExchangeMode::kDelegate;
  Start();
  SendStep(0);
  Replace({0}, 0);
  EXPECT_TRUE(Gradient(0, 0, 1)->answered());
  EXPECT_EQ(Statistics(5, 1, 1)->reason(), ErrorReason::kNotActive);
  EXPECT_TRUE(Statistics(5, 0, 1)->accepted()) << "it may have no credit for more before they are acknowledged";
  EXPECT_TRUE(Statistics(5, 1, 1)->accepted());
}

TEST_F(ShardControlTest, EpochOfTheSameRanksKeepsWhatTheySent) {
  Start();
  Abstain(ContributionKind::kStatistics, 0, 0);
  Abstain(ContributionKind::kStatistics, 0, 1);
  const auto waiting = Gradient(0, 0, 1);
  Replace({}, 0);
  EXPECT_EQ(GetErrorReason(waiting->outcome()), ErrorReason::kStaleEpoch);
  const auto again = Gradient(0, 0, 1);
  EXPECT_TRUE(again->duplicate());
  EXPECT_FALSE(again->answered());
  Gradient(0, 1, 3);
  ASSERT_TRUE(again->answered());
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardControlTest, TrainerMayRollBackWithANewEpochAlone) {
  spec.inv_freq = 1000;
  Start();
  for (uint64_t step = 50; step < 53; ++step) Gradients(step, {1, 1});
  EXPECT_EQ(Gradient(40, 0, 1)->reason(), ErrorReason::kStaleStep);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 52u);
  Replace({1}, 40, /*rollback_step=*/40);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 39u) << "as if the job had come to its checkpoint";
  EXPECT_TRUE(Gradient(40, 0, 1)->accepted());
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 40u);
  Replace({1}, 90, /*rollback_step=*/90);
  EXPECT_TRUE(Gradient(90, 0, 1)->accepted());
}

TEST_F(ShardControlTest, ARollbackIsHeardOfWithTheInstallAfterOneThatWasLost) {
  spec.inv_freq = 1000;
  Start();
  for (uint64_t step = 50; step < 53; ++step) Gradients(step, {1, 1});
  epoch = 2;
  last_rollback = {.epoch = 2, .step = 51};
  Replace({1}, 51);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 50u);
  EXPECT_EQ(Gradients(51, {5, 5})->values(), std::vector<float>(6, 5)) << "not the answer from before the rollback";
  Replace({1}, 51);
  EXPECT_EQ(Gradients(51, {7, 7})->values(), std::vector<float>(6, 5)) << "it rolls back once";
}

TEST_F(ShardControlTest, ARollbackFromBeforeASessionWasHereIsNoNewsLater) {
  spec.inv_freq = 1000;
  MakeShard();
  Replace({1}, 50, /*rollback_step=*/50);
  EXPECT_TRUE(Gradients(60, {1, 1})->accepted());
  Replace({1}, 60);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 60u);
}

TEST_F(ShardControlTest, NamesWhoHoldsTheOthersUp) {
  struct Recorder final : public Observer {
    void OnStragglers(absl::string_view job, const std::vector<uint32_t>& ranks) override {
      EXPECT_EQ(job, "job");
      reported.push_back(ranks);
    }
    std::vector<std::vector<uint32_t>> reported;
  } recorder;
  options.slow_worker = absl::Seconds(30);
  spec.world_size = 3;
  Start(recorder);
  EXPECT_TRUE(Statistics(0, 1, 1)->accepted());
  clock.Advance(absl::Seconds(29));
  shard->upkeep().ReportStragglers();
  EXPECT_TRUE(recorder.reported.empty());
  EXPECT_TRUE(Statistics(1, 1, 1)->accepted());
  clock.Advance(absl::Seconds(1));
  shard->upkeep().ReportStragglers();
  shard->upkeep().ReportStragglers();
  EXPECT_THAT(recorder.reported, ::testing::ElementsAre(::testing::ElementsAre(0u, 2u))) << "once";
  const auto missing = [&](uint64_t step) {
    return *shard->data_plane().MissingRanks(Header(ContributionKind::kStatistics, step, 1).key);
  };
  EXPECT_THAT(missing(0), ::testing::ElementsAre(0u, 2u));
  EXPECT_TRUE(missing(2).empty()) << "not open";
  EXPECT_TRUE(Statistics(0, 0, 1)->accepted());
  EXPECT_THAT(missing(0), ::testing::ElementsAre(2u));
  shard->upkeep().ReportStragglers();
  EXPECT_THAT(recorder.reported.back(), ::testing::ElementsAre(2u));
  EXPECT_TRUE(Statistics(0, 2, 1)->accepted());
  shard->upkeep().ReportStragglers();
  EXPECT_TRUE(recorder.reported.back().empty());
  clock.Advance(absl::Seconds(40));
  shard->upkeep().ReportStragglers();
  EXPECT_THAT(recorder.reported.back(), ::testing::ElementsAre(0u, 2u)) << "for the next step";
  EXPECT_TRUE(Gradient(2, 1, 1)->accepted());
  EXPECT_THAT(missing(2), ::testing::ElementsAre(0u, 1u, 2u)) << "statistics, also of the rank whose gradient is there";
  shard.reset();
}

TEST_F(ShardControlTest, OldEpochsAndIncarnationsAreFenced) {
  Start();
  SessionInstall next = MakeInstall(2);
  next.members[1].incarnation = 5;
  ASSERT_TRUE(shard->Install(next).ok());
  EXPECT_EQ(Gradient(0, 0, 1)->reason(), ErrorReason::kStaleEpoch);
  epoch = 2;
  EXPECT_EQ(Gradient(0, 1, 1)->reason(), ErrorReason::kStaleIncarnation);
  EXPECT_TRUE(Gradient(0, 0, 1)->accepted());
  EXPECT_EQ(GetErrorReason(shard->Install(MakeInstall(1)).status()), ErrorReason::kStaleEpoch);
  EXPECT_EQ(GetErrorReason(shard->Install(MakeInstall(2)).status()), ErrorReason::kStaleIncarnation);
}

TEST_F(ShardControlTest, AnotherSpecOrLayerSetIsRefused) {
  Start();
  SessionInstall seeded = MakeInstall(2), fewer = MakeInstall(2);
  seeded.spec.seed = 99;
  fewer.layers = {0};
  EXPECT_THAT(shard->Install(seeded), ReasonIs(ErrorReason::kSpecMismatch, HasSubstr("seed")));
  EXPECT_THAT(shard->Install(fewer),
              ReasonIs(ErrorReason::kSpecMismatch, HasSubstr("owns 2 layers, got another set of 1")));
}

TEST_F(ShardControlTest, RemoveAbortsWaitersAndFreesEverything) {
  Start();
  SendStep(0);
  EXPECT_GT(backend->allocated_bytes(), 0);
  const auto waiting = Gradient(1, 0, 1);
  EXPECT_TRUE(*shard->Remove(kSession));
  EXPECT_THAT(waiting->outcome(), StatusIs(absl::StatusCode::kAborted));
  EXPECT_EQ(shard->memory()->reserved(), 0);
  EXPECT_EQ(shard->in_flight(), 0);
  EXPECT_EQ(backend->allocated_bytes(), 0);
  EXPECT_FALSE(*shard->Remove(kSession));
  EXPECT_EQ(Gradient(0, 0, 1)->reason(), ErrorReason::kUnknownSession);
}

TEST_F(ShardControlTest, LaterSessionOfTheSameNameReplacesTheForgottenOne) {
  Start();
  const auto waiting = Gradient(0, 0, 1);
  SessionInstall later = MakeInstall();
  later.session_id = kSession + 1;
  const int64_t reserved = shard->memory()->reserved();
  ASSERT_TRUE(shard->Install(later).ok());
  EXPECT_TRUE(waiting->answered());
  EXPECT_EQ(shard->memory()->reserved(), reserved);
  ASSERT_EQ(shard->ListSessions().size(), 1u);
  EXPECT_EQ(shard->ListSessions()[0].session_id, kSession + 1);
  EXPECT_EQ(GetErrorReason(shard->Install(MakeInstall()).status()), ErrorReason::kStaleEpoch);
}

TEST_F(ShardControlTest, DrainRefusesNewSessionsAlone) {
  Start();
  shard->BeginDrain();
  Replace({0, 1}, 0);
  EXPECT_TRUE(Gradient(0, 0, 1)->accepted());
  SessionInstall other = MakeInstall();
  other.session_id = kSession + 1;
  other.spec.name = "other";
  const int64_t reserved = shard->memory()->reserved();
  EXPECT_THAT(shard->Install(other), StatusIs(absl::StatusCode::kUnavailable, ErrorReason::kDraining));
  EXPECT_EQ(shard->memory()->reserved(), reserved);
}

TEST_F(ShardControlTest, TellsEachInstallationAndItsRemovalOnce) {
  struct Recorder final : Observer {
    void OnSessionInstalled(absl::string_view job) override { jobs.push_back("+" + std::string(job)); }
    void OnSessionRemoved(absl::string_view job) override { jobs.push_back("-" + std::string(job)); }
    void OnReservedBytes(int64_t bytes, int64_t) override { reserved = bytes; }
    void OnShardSessions(int64_t count) override { sessions = count; }
    std::vector<std::string> jobs;
    int64_t reserved = 0, sessions = 0;
  } recorder;
  Start(recorder);
  Replace({0, 1}, 0);
  SessionInstall refused = MakeInstall();
  refused.session_id = kSession - 1;
  EXPECT_FALSE(shard->Install(refused).ok());
  EXPECT_THAT(recorder.jobs, ::testing::ElementsAre("+job"));
  EXPECT_EQ(recorder.reserved, shard->memory()->reserved());
  SessionInstall later = MakeInstall();
  later.session_id = kSession + 1;
  ASSERT_TRUE(shard->Install(later).ok());
  EXPECT_THAT(recorder.jobs, ::testing::ElementsAre("+job", "-job", "+job"));
  EXPECT_EQ(recorder.sessions, 1);
  EXPECT_TRUE(*shard->Remove(kSession + 1));
  EXPECT_FALSE(*shard->Remove(kSession + 1));
  EXPECT_THAT(recorder.jobs, ::testing::ElementsAre("+job", "-job", "+job", "-job"));
  EXPECT_EQ(recorder.reserved, 0);
  EXPECT_EQ(recorder.sessions, 0);
  shard.reset();
}

TEST_F(ShardControlTest, ListsSessionsAndLayers) {
  Start();
  Gradient(4, 0, 1);
  const std::vector<ShardSessionSummary> sessions = shard->ListSessions();
  ASSERT_EQ(sessions.size(), 1u);
  EXPECT_EQ(sessions[0].spec, spec);
  EXPECT_EQ(sessions[0].epoch, 1u);
  EXPECT_EQ(sessions[0].joined, 2u);
  EXPECT_EQ(sessions[0].last_step, 4u);
  EXPECT_EQ(StatsOf(1).name, "second");
  EXPECT_EQ(GetErrorReason(shard->GetLayerStats("other").status()), ErrorReason::kUnknownSession);
}

TEST_F(ShardControlTest, SteadyStateAllocatesNothingMore) {
  spec.world_size = 4;
  Start();
  const int64_t idle = backend->allocated_bytes();
  for (uint64_t step = 0; step < 50; ++step) SendStep(step);
  // One lease of each scratch pool, whatever the number of steps.
  EXPECT_EQ(backend->allocated_bytes() - idle, 4 * (4 * 5 + 2 * 6));
}

}  // namespace
}  // namespace precondor
