// SPDX-License-Identifier: Apache-2.0
// A coordinator's calls to a shard: installing, epochs, capacity, removal.
#include "server/core/resources/reservation.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ShardControlTest : public ShardFixture {
 protected:
  // A new epoch, in which other processes hold these ranks and begin at `first_step`.
  void Replace(uint64_t next, const std::vector<uint32_t>& ranks, uint64_t first_step,
               std::optional<uint64_t> rollback_step = std::nullopt) {
    if (rollback_step.has_value()) last_rollback = {.epoch = next, .step = *rollback_step};
    for (uint32_t rank : ranks) incarnations[rank] = next;
    SessionInstall install = MakeInstall(next);
    for (uint32_t rank : ranks) install.members[rank].first_step = first_step;
    install.rollback_epoch = last_rollback.epoch;
    install.rollback_step = last_rollback.step;
    ASSERT_TRUE(shard->Install(install).ok());
    epoch = next;
  }

  struct {
    uint64_t epoch = 0;
    uint64_t step = 0;
  } last_rollback;
};

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
  const absl::Status status = shard->Install(MakeInstall()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kCapacity);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("needed ", kNeeded, " bytes, reserved 0 of capacity ", kNeeded - 1)));
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
  const absl::Status status = shard->Install(MakeInstall()).status();
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kCapacity) << status;
}

TEST_F(ShardControlTest, RefusesMalformedInstalls) {
  MakeShard();
  SessionInstall install = MakeInstall();
  install.layers = {1, 0};
  EXPECT_EQ(shard->Install(install).status().code(), absl::StatusCode::kInvalidArgument);
  install.layers = {2};
  EXPECT_EQ(shard->Install(install).status().code(), absl::StatusCode::kInvalidArgument);
  install = MakeInstall();
  install.members.push_back({.rank = 2, .incarnation = 1});
  EXPECT_EQ(shard->Install(install).status().code(), absl::StatusCode::kInvalidArgument);
  install = MakeInstall();
  install.session_id = 0;
  EXPECT_EQ(shard->Install(install).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(shard->memory()->reserved(), 0);
}

TEST_F(ShardControlTest, JobThatGoesBackDropsOpenSlotsAndKeepsFactors) {
  Start();
  Statistics(0, 0, 1);
  Statistics(0, 1, 1);
  const auto waiting = Gradient(0, 0, 1);
  Replace(2, {0}, 0, /*rollback_step=*/0);
  ASSERT_TRUE(waiting->result.has_value());
  EXPECT_EQ(waiting->result->status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kStaleEpoch);
  EXPECT_EQ(shard->in_flight(), 0);
  // Nothing of the first epoch counts: both ranks have to come again, with whatever they have now.
  Abstain(ContributionKind::kStatistics, 0, 0);
  Abstain(ContributionKind::kStatistics, 0, 1);
  Gradient(0, 0, 3);
  const auto reply = Gradient(0, 1, 3);
  ASSERT_TRUE(reply->result.has_value());
  EXPECT_EQ((*reply->result)->factor_version, 1u);
  EXPECT_THAT(reply->values(), ::testing::Each(::testing::FloatEq(6.0f)));
}

TEST_F(ShardControlTest, FenceEndsTheEpochAndTellsWhetherTheStepsAreKept) {
  spec.inv_freq = 1000;
  options.window_steps = 2;
  Start();
  for (uint64_t step = 50; step < 53; ++step) {
    Gradient(step, 0, 1);
    Gradient(step, 1, 1);
  }
  const auto waiting = Gradient(53, 0, 1);
  EpochFence fence{.session_id = kSession, .epoch = 2, .members = {{0, 1, 0}, {1, 2, 52}}};
  EXPECT_EQ(*shard->Fence(fence), std::nullopt) << "rank 0 is who it was, wherever it began";
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kStaleEpoch);
  EXPECT_EQ(Gradient(53, 1, 1)->reason(), ErrorReason::kStaleEpoch);
  epoch = 2;
  EXPECT_EQ(Gradient(53, 0, 1)->reason(), ErrorReason::kNotActive) << "until it is installed";
  fence.members[1].first_step = 51;
  EXPECT_EQ(*shard->Fence(fence), 51u) << "steps from 52 on are kept";
  Replace(2, {1}, 52);
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
  Statistics(0, 0, 1);
  Statistics(0, 1, 1);
  Gradient(0, 0, 1);
  Gradient(0, 1, 3);
  Statistics(1, 0, 1);
  Statistics(1, 1, 1);
  const auto open = Gradient(1, 1, 5);
  Replace(2, {1}, 0);
  EXPECT_EQ(GetErrorReason(open->result->status()), ErrorReason::kStaleEpoch);
  // The new process repeats step 0 with other bytes: it gets the answer that rank 0 got, and nothing counts twice.
  EXPECT_TRUE(Statistics(0, 1, 9)->duplicate());
  const auto repeated = Gradient(0, 1, 9);
  EXPECT_TRUE(repeated->duplicate());
  EXPECT_EQ((*repeated->result)->factor_version, 1u);
  EXPECT_THAT(repeated->values(), ::testing::Each(::testing::FloatEq(4.0f)));
  EXPECT_EQ(Gradient(0, 0, 9)->reason(), ErrorReason::kConflict) << "rank 0 is the same process as before";
  // And the step that was open needs rank 0 alone.
  const auto last = Gradient(1, 0, 1);
  EXPECT_FALSE(last->duplicate());
  EXPECT_EQ((*last->result)->factor_version, 2u);
  EXPECT_THAT(last->values(), ::testing::Each(::testing::FloatEq(9.0f)));
  EXPECT_EQ(log->updates().size(), 2u);
}

TEST_F(ShardControlTest, NoStepRetiresBeforeAReplacedRankHasComePastIt) {
  options.window_steps = 2;
  spec.inv_freq = 1000;
  Start();
  for (uint64_t step = 1; step < 3; ++step) {
    Gradient(step, 0, 1);
    Gradient(step, 1, 3);
  }
  Replace(2, {1}, 1);
  const auto early = Gradient(3, 0, 1);
  EXPECT_EQ(early->reason(), ErrorReason::kNotActive);
  EXPECT_THAT(std::string(early->ack->status().message()), HasSubstr("rank 1 begins again"));
  EXPECT_TRUE(Gradient(1, 1, 8)->result.has_value());
  EXPECT_EQ(Gradient(3, 0, 1)->reason(), ErrorReason::kNotActive) << "the answer may be lost on its way";
  EXPECT_TRUE(Gradient(2, 1, 8)->result.has_value());
  EXPECT_TRUE(Gradient(3, 0, 1)->accepted());
}

TEST_F(ShardControlTest, ReplacedRanksDoNotWaitForEachOtherAfterAStretchWithoutFrames) {
  options.window_steps = 2;
  spec.inv_freq = 5;
  spec.exchange = ExchangeMode::kDelegate;
  Start();
  Statistics(0, 0, 1);
  Statistics(0, 1, 1);
  Gradient(0, 0, 1);
  Replace(2, {0, 1}, 0);
  EXPECT_TRUE(Statistics(0, 0, 1)->duplicate());
  EXPECT_TRUE(Statistics(0, 1, 1)->duplicate());
  EXPECT_TRUE(Gradient(0, 0, 1)->result.has_value());
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
  Statistics(0, 0, 1);
  Statistics(0, 1, 1);
  Gradient(0, 0, 1);
  Replace(2, {0}, 0);
  EXPECT_TRUE(Gradient(0, 0, 1)->result.has_value());
  EXPECT_EQ(Statistics(5, 1, 1)->reason(), ErrorReason::kNotActive);
  EXPECT_TRUE(Statistics(5, 0, 1)->accepted()) << "it may have no credit for more before they are acknowledged";
  EXPECT_TRUE(Statistics(5, 1, 1)->accepted());
}

TEST_F(ShardControlTest, EpochOfTheSameRanksKeepsWhatTheySent) {
  Start();
  Abstain(ContributionKind::kStatistics, 0, 0);
  Abstain(ContributionKind::kStatistics, 0, 1);
  const auto waiting = Gradient(0, 0, 1);
  Replace(2, {}, 0);
  EXPECT_EQ(GetErrorReason(waiting->result->status()), ErrorReason::kStaleEpoch);
  const auto again = Gradient(0, 0, 1);
  EXPECT_TRUE(again->duplicate());
  EXPECT_FALSE(again->result.has_value());
  Gradient(0, 1, 3);
  ASSERT_TRUE(again->result.has_value());
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardControlTest, TrainerMayRollBackWithANewEpochAlone) {
  spec.inv_freq = 1000;
  Start();
  for (uint64_t step = 50; step < 53; ++step) {
    Gradient(step, 0, 1);
    Gradient(step, 1, 1);
  }
  EXPECT_EQ(Gradient(40, 0, 1)->reason(), ErrorReason::kStaleStep);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 52u);
  Replace(2, {1}, 40, /*rollback_step=*/40);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 39u) << "as if the job had come to its checkpoint";
  EXPECT_TRUE(Gradient(40, 0, 1)->accepted());
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 40u);
  Replace(3, {1}, 90, /*rollback_step=*/90);
  EXPECT_TRUE(Gradient(90, 0, 1)->accepted());
}

TEST_F(ShardControlTest, ARollbackIsHeardOfWithTheInstallAfterOneThatWasLost) {
  spec.inv_freq = 1000;
  Start();
  const auto gradients = [this](uint64_t step, float value) {
    Gradient(step, 0, value);
    return Gradient(step, 1, value);
  };
  for (uint64_t step = 50; step < 53; ++step) gradients(step, 1);
  last_rollback = {.epoch = 2, .step = 51};
  Replace(3, {1}, 51);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 50u);
  EXPECT_EQ(gradients(51, 5)->values(), std::vector<float>(6, 5)) << "not the answer from before the rollback";
  Replace(4, {1}, 51);
  EXPECT_EQ(gradients(51, 7)->values(), std::vector<float>(6, 5)) << "it rolls back once";
}

TEST_F(ShardControlTest, ARollbackFromBeforeASessionWasHereIsNoNewsLater) {
  spec.inv_freq = 1000;
  MakeShard();
  Replace(5, {1}, 50, /*rollback_step=*/50);
  Gradient(60, 0, 1);
  EXPECT_TRUE(Gradient(60, 1, 1)->accepted());
  Replace(6, {1}, 60);
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
  Shard slow(options, *backend, executor, clock, logger, recorder);
  ASSERT_TRUE(slow.Install(MakeInstall()).ok());
  const auto send = [&](uint64_t step, uint32_t rank) {
    const ContributionHeader header = Header(ContributionKind::kStatistics, step, rank);
    SubmitTo(slow, header, Filled(header, 1), [](absl::StatusOr<bool> taken) { EXPECT_TRUE(taken.ok()); });
  };
  send(0, 1);
  clock.Advance(absl::Seconds(29));
  slow.upkeep().ReportStragglers();
  EXPECT_TRUE(recorder.reported.empty());
  send(1, 1);
  clock.Advance(absl::Seconds(1));
  slow.upkeep().ReportStragglers();
  slow.upkeep().ReportStragglers();
  EXPECT_THAT(recorder.reported, ::testing::ElementsAre(::testing::ElementsAre(0u, 2u))) << "once";
  const auto missing = [&](uint64_t step) {
    return *slow.data_plane().MissingRanks(Header(ContributionKind::kStatistics, step, 1).key);
  };
  EXPECT_THAT(missing(0), ::testing::ElementsAre(0u, 2u));
  EXPECT_TRUE(missing(2).empty()) << "not open";
  send(0, 0);
  EXPECT_THAT(missing(0), ::testing::ElementsAre(2u));
  slow.upkeep().ReportStragglers();
  EXPECT_THAT(recorder.reported.back(), ::testing::ElementsAre(2u));
  send(0, 2);
  slow.upkeep().ReportStragglers();
  EXPECT_TRUE(recorder.reported.back().empty());
  clock.Advance(absl::Seconds(40));
  slow.upkeep().ReportStragglers();
  EXPECT_THAT(recorder.reported.back(), ::testing::ElementsAre(0u, 2u)) << "for the next step";
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
  SessionInstall install = MakeInstall(2);
  install.spec.seed = 99;
  absl::Status status = shard->Install(install).status();
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kSpecMismatch);
  EXPECT_THAT(std::string(status.message()), HasSubstr("seed"));
  install = MakeInstall(2);
  install.layers = {0};
  status = shard->Install(install).status();
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kSpecMismatch);
  EXPECT_THAT(std::string(status.message()), HasSubstr("owns 2 layers, got another set of 1"));
}

TEST_F(ShardControlTest, RemoveAbortsWaitersAndFreesEverything) {
  Start();
  Statistics(0, 0, 1);
  Statistics(0, 1, 1);
  Gradient(0, 0, 1);
  Gradient(0, 1, 1);
  EXPECT_GT(backend->allocated_bytes(), 0);
  const auto waiting = Gradient(1, 0, 1);
  EXPECT_TRUE(*shard->Remove(kSession));
  ASSERT_TRUE(waiting->result.has_value());
  EXPECT_EQ(waiting->result->status().code(), absl::StatusCode::kAborted);
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
  EXPECT_TRUE(waiting->result.has_value());
  EXPECT_EQ(shard->memory()->reserved(), reserved);
  ASSERT_EQ(shard->ListSessions().size(), 1u);
  EXPECT_EQ(shard->ListSessions()[0].session_id, kSession + 1);
  EXPECT_EQ(GetErrorReason(shard->Install(MakeInstall()).status()), ErrorReason::kStaleEpoch);
}

TEST_F(ShardControlTest, DrainRefusesNewSessionsAlone) {
  Start();
  shard->BeginDrain();
  Replace(2, {0, 1}, 0);
  EXPECT_TRUE(Gradient(0, 0, 1)->accepted());
  SessionInstall other = MakeInstall();
  other.session_id = kSession + 1;
  other.spec.name = "other";
  const int64_t reserved = shard->memory()->reserved();
  const absl::Status status = shard->Install(other).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(GetErrorReason(status), ErrorReason::kDraining);
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
  shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, recorder);
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  Replace(2, {0, 1}, 0);
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
  for (uint64_t step = 0; step < 50; ++step) {
    for (uint32_t rank = 0; rank < 4; ++rank) Statistics(step, rank, 1);
    for (uint32_t rank = 0; rank < 4; ++rank) Gradient(step, rank, 1);
  }
  // One lease of each scratch pool, whatever the number of steps.
  EXPECT_EQ(backend->allocated_bytes() - idle, 4 * (4 * 5 + 2 * 6));
}

}  // namespace
}  // namespace precondor
