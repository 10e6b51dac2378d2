// SPDX-License-Identifier: Apache-2.0
// A shard that is lost at any moment comes back from its journal, and every answer is the one that it would have been.
#include <map>
#include <random>
#include <tuple>

#include "kernels/methods/registry.h"
#include "tests/support/inline_executor.h"
#include "tests/support/memory_journal.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using Key = std::tuple<uint64_t, uint32_t, uint32_t>;  // step, layer, rank

class ShardRecoveryTest : public ShardFixture {
 protected:
  static constexpr uint64_t kSteps = 14;

  ShardRecoveryTest() {
    options.journal = journal.get();
    spec.method.name = "mkor";
    spec.method.options["rank"] = 2.0;
    spec.inv_freq = 2;
    spec.warmup_steps = 3;
    options.make_method = MakeMethod;
  }

  // One rank's work on one layer: what it sent, what it keeps in case that the shard loses it.
  struct Lane {
    uint32_t rank = 0, layer = 0;
    uint64_t step = 0;
    std::vector<ContributionKind> sent;  // of `step`
    std::shared_ptr<Reply> waiting;
    uint64_t factor_version = 0;  // of the last answer
  };

  std::shared_ptr<Reply> SendOne(const Lane& lane, ContributionKind kind, uint64_t step) {
    const ContributionHeader header = Header(kind, step, lane.rank, lane.layer);
    std::shared_ptr<Reply> reply = Send(header, Distinct(header));
    // A step that is over needs nothing more.
    EXPECT_TRUE(reply->accepted() || (step < lane.step && reply->reason() == ErrorReason::kStaleStep))
        << reply->ack->status();
    return reply;
  }
  std::vector<ContributionKind> Kinds(uint64_t step) const {
    if (!IsStatisticStep(spec, step)) return {ContributionKind::kGradient};
    return {ContributionKind::kStatistics, ContributionKind::kGradient};
  }

  // One thing that a worker would do. True when the lane has come to its end.
  bool Advance(Lane& lane) {
    if (lane.step == kSteps) return true;
    if (lane.waiting != nullptr) {
      if (!lane.waiting->answered()) return false;
      EXPECT_TRUE(lane.waiting->result->ok()) << lane.waiting->result->status();
      if (lane.waiting->result->ok()) {
        const GradientResult& answer = **lane.waiting->result;
        answers[{lane.step, lane.layer, lane.rank}] = *answer.bytes;
        lane.factor_version = answer.factor_version;
      }
      lane.waiting = nullptr;
      lane.sent.clear();
      return ++lane.step == kSteps;
    }
    const ContributionKind kind = Kinds(lane.step)[lane.sent.size()];
    const std::shared_ptr<Reply> reply = SendOne(lane, kind, lane.step);
    lane.sent.push_back(kind);
    if (kind == ContributionKind::kGradient) lane.waiting = reply;
    return false;
  }

  // The shard is lost with every answer that was under way; workers send again what they keep.
  void Crash(std::vector<Lane>& lanes, std::mt19937_64& random) {
    ComeBack(*journal);
    std::shuffle(lanes.begin(), lanes.end(), random);
    for (Lane& lane : lanes) {
      if (lane.step > 0) {
        const ContributionKey last = Header(ContributionKind::kGradient, lane.step - 1, lane.rank, lane.layer).key;
        const absl::Status known =
            shard->data_plane()
                .Resume({.key = last, .factor_version = lane.factor_version, .next_step = last.step})
                .status();
        EXPECT_TRUE(known.ok()) << known;
        for (ContributionKind kind : Kinds(lane.step - 1)) SendOne(lane, kind, lane.step - 1);
      }
      for (ContributionKind kind : lane.sent) {
        const std::shared_ptr<Reply> reply = SendOne(lane, kind, lane.step);
        if (kind == ContributionKind::kGradient) lane.waiting = reply;
      }
    }
  }

  // All answers of a run in which the shard is lost after a step with this probability.
  std::map<Key, Payload> Run(uint64_t seed, double crashes) {
    answers.clear();
    shard.reset();
    journal = std::make_unique<MemoryJournal>();
    options.journal = journal.get();
    Start();
    std::mt19937_64 random(seed);
    std::bernoulli_distribution crash(crashes);
    std::vector<Lane> lanes;
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
        lanes.push_back({.rank = rank, .layer = layer, .sent = {}, .waiting = {}});
      }
    }
    for (size_t ended = 0; ended < lanes.size();) {
      Advance(lanes[random() % lanes.size()]);
      if (crash(random)) Crash(lanes, random);
      ended = static_cast<size_t>(
          std::count_if(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.step == kSteps; }));
    }
    EXPECT_EQ(shard->in_flight(), 0);
    return answers;
  }

  void ExpectExact() {
    const std::map<Key, Payload> expected = Run(1, 0);
    ASSERT_EQ(expected.size(), kSteps * 2 * spec.world_size);
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      SCOPED_TRACE(seed);
      EXPECT_EQ(Run(seed, 0.1), expected);
      if (HasFailure()) return;
    }
  }

  std::unique_ptr<MemoryJournal> journal = std::make_unique<MemoryJournal>();
  std::map<Key, Payload> answers;
};

TEST_F(ShardRecoveryTest, GivesTheAnswersOfAShardThatWasNeverLost) { ExpectExact(); }

TEST_F(ShardRecoveryTest, GivesThemFromSnapshots) {
  options.snapshot_interval_steps = 3;
  ExpectExact();
  EXPECT_GT(journal->snapshots(), 0);
}

TEST_F(ShardRecoveryTest, GivesThemInHalfPrecisionWithThreeWorkers) {
  spec.world_size = 3;
  spec.statistics_dtype = DType::kF16;
  spec.gradient_dtype = DType::kBF16;
  options.snapshot_interval_steps = 5;
  ExpectExact();
}

// With deferred decompositions, alone and amid snapshots.
TEST_F(ShardRecoveryTest, GivesThemWithDeferredWork) {
  spec.method = {.name = "kfac",
                 .options = {{"refresh_lag", 2.0}, {"inv_update_steps", std::string("2")}, {"stagger", false}}};
  ExpectExact();
  options.snapshot_interval_steps = 3;
  ExpectExact();
  EXPECT_GT(journal->snapshots(), 0);
}

class ShardJournalTest : public ShardRecoveryTest {
 protected:
  ShardJournalTest() {
    spec.world_size = 1;
    spec.inv_freq = 1;
    spec.method = {.name = "fake", .options = {}};
    UseFakeMethod();
  }
  void StartWithCovariances() {
    spec.statistics = StatisticsKind::kCovariance;
    spec.layers.pop_back();
    UseFakeMethod(/*takes_covariances=*/true);
    Start();
  }
};

TEST_F(ShardJournalTest, ASessionWithAGapInItsRecordsIsGivenUp) {
  Start();
  SendStep(0);
  journal->LoseNext(1);
  SendStep(1);
  Statistics(2, 0, 1);
  MakeShard();
  journal->Restore(*shard);
  EXPECT_EQ(shard->replay().Finish(), std::vector<uint64_t>{kSession});
  EXPECT_TRUE(shard->ListSessions().empty());
  EXPECT_EQ(shard->memory()->reserved(), 0);
  // The coordinator installs it anew, and that is what comes back then.
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  Statistics(3, 0, 1);
  ComeBack(*journal);
  EXPECT_EQ(shard->ListSessions().size(), 1u);
}

TEST_F(ShardJournalTest, AnAnswerShowsThatTheUpdateBeforeItIsMissing) {
  Start();
  SendStep(0);
  journal->LoseNext(1);
  SendStep(1);
  MakeShard();
  journal->Restore(*shard);
  EXPECT_EQ(shard->replay().Finish(), std::vector<uint64_t>{kSession});
}

TEST_F(ShardJournalTest, ASnapshotHealsAGap) {
  options.snapshot_interval_steps = 2;
  spec.layers.pop_back();
  Start();
  journal->LoseNext(1);
  for (uint64_t step = 0; step < 3; ++step) SendStep(step);
  EXPECT_EQ(journal->snapshots(), 1);
  ComeBack(*journal);
  const std::shared_ptr<Reply> reply = Gradient(3, 0, 1);
  Statistics(3, 0, 1);
  EXPECT_EQ(reply->version(), 4u);
}

TEST_F(ShardJournalTest, CovariancesThatTheJournalDroppedAreLost) {
  options.snapshot_interval_steps = 2;
  StartWithCovariances();
  for (uint64_t step = 0; step < 6; ++step) EXPECT_EQ(SendStep(step)[0]->version(), step + 1);
  EXPECT_EQ(journal->snapshots(), 2);
  ComeBack(*journal);
  // The cut before step 4 has four updates; those of steps 4 and 5 were dropped.
  ASSERT_TRUE(Resume(6, 0, 6).ok());
  const std::shared_ptr<Reply> reply = SendStep(6)[0];
  EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
  EXPECT_EQ(reply->version(), 5u);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardJournalTest, CovariancesComeBackFromTheJournalOfGradients) {
  options.snapshot_interval_steps = 4;
  journal->set_keeps_gradients(true);
  StartWithCovariances();
  for (uint64_t step = 0; step < 9; ++step) {
    const std::vector<float> before = SendStep(step)[0]->values();
    ComeBack(*journal);
    EXPECT_EQ(Resume(step, 0, step).value(), 0u);
    EXPECT_TRUE(Statistics(step, 0, 1)->duplicate());
    const std::shared_ptr<Reply> again = Gradient(step, 0, 1);
    EXPECT_EQ(again->version(), step + 1);
    EXPECT_EQ(again->values(), before);
  }
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardJournalTest, NobodyIsServedBeforeEverythingIsBack) {
  Start();
  Statistics(0, 0, 1);
  MakeShard().replay().Begin();
  journal->Restore(*shard);
  EXPECT_TRUE(absl::IsUnavailable(shard->data_plane().CheckServing()));
  EXPECT_TRUE(absl::IsUnavailable(shard->Describe().status()));
  EXPECT_TRUE(absl::IsUnavailable(shard->Install(MakeInstall(2)).status()));
  EXPECT_TRUE(absl::IsUnavailable(shard->Remove(kSession).status()));
  EXPECT_TRUE(absl::IsUnavailable(Gradient(0, 0, 1)->ack->status()));
  shard->replay().Finish();
  EXPECT_EQ(shard->Describe()->sessions.size(), 1u);
  EXPECT_EQ(Gradient(0, 0, 1)->version(), 1u);
}

TEST_F(ShardJournalTest, ARemovedSessionStaysRemoved) {
  Start();
  Statistics(0, 0, 1);
  ASSERT_TRUE(*shard->Remove(kSession));
  ComeBack(*journal);
  EXPECT_TRUE(shard->ListSessions().empty());
}

TEST_F(ShardJournalTest, AnUpdateThatFailedIsNotMadeAfterAll) {
  Start();
  SendStep(0);
  log->set_fail_updates(true);
  const std::shared_ptr<Reply> before = SendStep(1)[0];
  log->set_fail_updates(false);
  ComeBack(*journal);
  const std::shared_ptr<Reply> again = Gradient(1, 0, 1);
  EXPECT_EQ(before->version(), 1u);
  EXPECT_EQ(again->version(), 1u);
  EXPECT_EQ(again->values(), before->values());
}

TEST_F(ShardJournalTest, AnIdentityThatWasAnsweredIsAnsweredAgain) {
  Start();
  Statistics(0, 0, 1);
  log->set_poison_results(true);
  EXPECT_EQ(Gradient(0, 0, 1)->decision(), Decision::kIdentity);
  log->set_poison_results(false);
  ComeBack(*journal);
  const std::shared_ptr<Reply> again = Gradient(0, 0, 1);
  EXPECT_EQ(again->decision(), Decision::kIdentity);
  EXPECT_EQ(again->answer().reason, "the preconditioned gradient is not finite");
}

TEST_F(ShardJournalTest, AnAnswerThatCannotBeRepeatedIsAnError) {
  Start();
  Statistics(0, 0, 1);
  EXPECT_EQ(Gradient(0, 0, 1)->decision(), Decision::kPreconditioned);
  ComeBack(*journal);
  log->set_poison_results(true);
  const std::shared_ptr<Reply> again = Gradient(0, 0, 1);
  EXPECT_THAT(again->outcome(), StatusIs(absl::StatusCode::kInternal));
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardJournalTest, StatisticsThatWereCountedAreNotCountedAgain) {
  Start();
  Statistics(0, 0, 1);
  ComeBack(*journal);
  EXPECT_TRUE(Statistics(0, 0, 1)->duplicate());
  EXPECT_EQ(Gradient(0, 0, 1)->version(), 1u);
}

TEST_F(ShardJournalTest, WhatAShardThatCameBackGathersIsWrittenDownToo) {
  Start();
  Statistics(0, 0, 1);
  ComeBack(*journal);
  Gradient(0, 0, 1);
  EXPECT_FALSE(Statistics(1, 0, 1)->duplicate());
  EXPECT_EQ(StatsOf(0).factor_version, 2u);
  ComeBack(*journal);
  Gradient(0, 0, 1);
  EXPECT_TRUE(Statistics(1, 0, 1)->duplicate());
  EXPECT_EQ(StatsOf(0).factor_version, 2u);
  EXPECT_EQ(log->updates().size(), 5u) << "one in the first life, two in each of the others";
}

TEST_F(ShardJournalTest, AStepThatIsAskedForAgainMeetsTheFactorsOfItsTime) {
  spec.world_size = 2;
  Start();
  SendStep(0);
  AllStatistics(1);
  EXPECT_EQ(StatsOf(0).factor_version, 2u);
  ComeBack(*journal);
  // One rank had its answer of step 0, the other one had not.
  EXPECT_EQ(Gradients(0, {1, 1})->version(), 1u);
  EXPECT_EQ(Gradients(1, {1, 1})->version(), 2u);
}

TEST_F(ShardJournalTest, AStepThatNobodyAsksForAgainHoldsNothingUp) {
  spec.world_size = 2;
  Start();
  SendStep(0);
  ComeBack(*journal);
  // One rank repeats what it need not, the other one goes on.
  const std::shared_ptr<Reply> repeated = Gradient(0, 0, 1);
  AllStatistics(1);
  EXPECT_EQ(Gradients(1, {1, 1})->version(), 2u);
  EXPECT_EQ(GetErrorReason(repeated->outcome()), ErrorReason::kStaleStep);
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardJournalTest, AStepThatWasPassedOverIsGoneForWhoeverBeginsWithIt) {
  spec.world_size = 2;
  Start();
  SendStep(0);
  ComeBack(*journal);
  SendStep(1);
  const auto fence = [this](uint64_t at_epoch, uint64_t first_step) {
    return shard->Fence({.session_id = kSession,
                         .epoch = at_epoch,
                         .members = {{.rank = 0, .incarnation = 1000 + at_epoch, .first_step = first_step}}});
  };
  EXPECT_EQ(*fence(2, 1), std::nullopt) << "its answer is there";
  EXPECT_EQ(*fence(3, 0), 0u) << "the job has to go back";
}

TEST_F(ShardJournalTest, AnInstallThatComesLateIsNotWhatTheShardComesBackFrom) {
  spec.world_size = 2;
  Start();
  SessionInstall late = MakeInstall();
  late.members.pop_back();
  ASSERT_TRUE(shard->Install(late).ok());
  const std::vector<InstallRecord> written = journal->Of<InstallRecord>();
  ASSERT_EQ(written.size(), 1u);
  EXPECT_EQ(written[0].install.members.size(), 2u);
  EXPECT_EQ(shard->Describe()->sessions[0].joined, 2u);
}

TEST_F(ShardJournalTest, AJobThatWentBackComesBackToWhereItWas) {
  Start();
  for (uint64_t step = 0; step < 9; ++step) SendStep(step);
  Replace({}, 0, /*rollback_step=*/3);
  ComeBack(*journal);
  // Nothing of the steps beyond is left in the way; their updates are in the factors.
  EXPECT_EQ(SendStep(3)[0]->version(), 10u);
  ComeBack(*journal);
  EXPECT_EQ(Gradient(3, 0, 1)->version(), 10u);
  // Back once more, with an update in hand that has come back and not had its turn.
  Replace({}, 0, /*rollback_step=*/1);
  EXPECT_EQ(SendStep(1)[0]->version(), 11u);
}

TEST_F(ShardJournalTest, AJobThatWentBackGetsSnapshotsOfTheStepsThatComeAgain) {
  spec.layers.pop_back();
  Start();
  const auto train = [this](uint64_t from, uint64_t through) {
    for (uint64_t step = from; step <= through; ++step) SendStep(step);
  };
  const auto request = [this](uint64_t step) {
    return shard->snapshots().Take({.session_id = kSession, .number = step, .step = step}).status();
  };
  train(0, 8);
  EXPECT_TRUE(absl::IsInvalidArgument(request(5)));
  Replace({}, 0, /*rollback_step=*/3);
  EXPECT_TRUE(absl::IsInvalidArgument(request(2)));
  ASSERT_TRUE(request(3).ok()) << "the first of them";
  train(3, 3);
  EXPECT_EQ(journal->snapshots(), 1);
  ASSERT_TRUE(request(5).ok());
  train(4, 4);
  EXPECT_EQ(journal->snapshots(), 1);
  train(5, 6);
  EXPECT_EQ(journal->snapshots(), 2);
  ComeBack(*journal);
  EXPECT_EQ(shard->Describe()->sessions[0].last_step, 6u);
  EXPECT_EQ(SendStep(7)[0]->version(), 14u) << "nine updates, four again, and this one";
}

}  // namespace
}  // namespace precondor
