// SPDX-License-Identifier: Apache-2.0
// Layers whose shard was lost go on from what it had written down: averages until then, and no update is missing.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/methods/registry.h"
#include "server/core/reservation.h"
#include "tests/support/memory_journal.h"
#include "tests/support/memory_peers.h"
#include "tests/unit/server/core/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

struct TakeoverObserver final : Observer {
  void OnUpdatesLost(absl::string_view, int64_t updates) override { lost += updates; }
  void OnLayersTakenOver(absl::string_view, TakeoverOutcome outcome, int64_t count) override {
    layers[outcome] += count;
  }
  int64_t lost = 0;
  std::map<TakeoverOutcome, int64_t> layers;
};

// The job of one rank, unless a test says otherwise. Shards come and go; a journal outlives its shard.
class ShardTakeoverTest : public ShardFixture {
 protected:
  ~ShardTakeoverTest() override { shard = nullptr; }

  ShardTakeoverTest() {
    spec.world_size = 1;
    spec.on_shard_loss = ShardLossPolicy::kDegrade;
    spec.method.name = "mkor";
    options.make_method = MakeMethod;
  }

  Shard& Begin(const std::shared_ptr<MemoryJournal>& journal, PeerFactors* peers) {
    shard = nullptr;
    own = journal;
    options.journal = journal.get();
    options.peers = peers;
    shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, seen);
    shard->Probe({.from = clock.Monotonic(), .duration = absl::Hours(1)}).IgnoreError();
    return *shard;
  }
  // The process ends and comes back.
  void Restart(const std::shared_ptr<MemoryJournal>& journal, PeerFactors* peers) {
    Begin(journal, peers).AwaitReplay();
    journal->Restore(*shard);
    ASSERT_TRUE(shard->FinishReplay().empty());
    shard->Probe({.from = clock.Monotonic(), .duration = absl::Hours(1)}).IgnoreError();
    Install(epoch);
  }
  void Install(uint64_t at_epoch, bool released = false, std::optional<uint64_t> goes_back_to = std::nullopt) {
    epoch = at_epoch;
    SessionInstall install = MakeInstall(epoch);
    install.factors_released = released;
    install.goes_back_to = goes_back_to;
    if (goes_back_to.has_value()) went_back_epoch = epoch;
    install.went_back_epoch = went_back_epoch;
    const absl::Status status = shard->Install(install).status();
    ASSERT_TRUE(status.ok()) << status;
  }
  static float ValueOf(uint64_t step, uint32_t layer) {
    return 1.0f + 0.25f * static_cast<float>((step * 7 + layer) % 11);
  }
  std::shared_ptr<Reply> SendTo(uint32_t layer, ContributionKind kind, uint64_t step, uint32_t rank = 0,
                                Mode mode = Mode::kSecondOrder) {
    ContributionHeader header = Header(kind, step, rank, layer);
    header.mode = mode;
    Payload payload = Filled(header, ValueOf(step, layer));
    return Send(header, std::move(payload));
  }
  // The answers to both layers.
  std::vector<std::shared_ptr<Reply>> Step(uint64_t step, Mode mode = Mode::kSecondOrder) {
    std::vector<std::shared_ptr<Reply>> replies;
    for (uint32_t layer : {0, 1}) {
      if (mode == Mode::kSecondOrder) SendTo(layer, ContributionKind::kStatistics, step);
      replies.push_back(SendTo(layer, ContributionKind::kGradient, step, 0, mode));
      EXPECT_TRUE(replies.back()->accepted()) << step << ": " << replies.back()->ack->status();
    }
    return replies;
  }
  void ExpectAverages(uint64_t step) {
    for (const std::shared_ptr<Reply>& reply : Step(step)) {
      ASSERT_TRUE(reply->result.has_value() && reply->result->ok()) << step;
      EXPECT_EQ(reply->decision(), Decision::kIdentity) << step;
      EXPECT_THAT((*reply->result)->reason, HasSubstr("waits for its factors"));
    }
  }
  // What a shard that nothing happens to answers each step with, and with what version.
  struct Answer {
    uint64_t version = 0;
    std::vector<float> values;
    bool operator==(const Answer&) const = default;
  };
  std::vector<Answer> AnswersOf(uint64_t step) {
    std::vector<Answer> answers;
    for (const std::shared_ptr<Reply>& reply : Step(step)) {
      if (!reply->result.has_value() || !reply->result->ok()) return {};
      answers.push_back({.version = (*reply->result)->factor_version, .values = reply->values()});
      EXPECT_EQ(reply->decision(), Decision::kPreconditioned) << step;
    }
    return answers;
  }
  std::vector<std::vector<Answer>> Undisturbed(uint64_t steps) {
    std::vector<std::vector<Answer>> answers;
    Begin(nullptr, nullptr);
    Install(1);
    for (uint64_t step = 0; step < steps; ++step) answers.push_back(AnswersOf(step));
    return answers;
  }
  // A shard that takes part in `steps` and is gone.
  std::shared_ptr<MemoryJournal> Lost(uint64_t steps) {
    auto journal = std::make_shared<MemoryJournal>();
    Begin(journal, nullptr);
    Install(1);
    for (uint64_t step = 0; step < steps; ++step) AnswersOf(step);
    shard = nullptr;
    return journal;
  }
  int64_t SessionBytes() const {
    const auto methods = MethodSet::Make(spec);
    return ComputeReservation(spec, *methods, {0, 1}, options.window_steps, executor.parallelism()).total();
  }
  // Scratch of one more operation, the bytes of the greatest state, what may be put aside.
  int64_t ExtraBytes() const {
    const auto methods = MethodSet::Make(spec);
    int64_t aside = 0, state = 0;
    for (const LayerSpec& layer : spec.layers) {
      aside += 32 * spec.world_size * (layer.d_in + layer.d_out) * 4;
      state = std::max(state, methods->of(0).StateBytes(layer));
    }
    return aside + state + ComputeReservation(spec, *methods, {0, 1}, options.window_steps, 1).scratch;
  }

  TakeoverObserver seen;
  MemoryPeers peers;
  std::shared_ptr<MemoryJournal> own;
  uint64_t went_back_epoch = 0;
};

TEST_F(ShardTakeoverTest, AnswersAreAveragesAndThenThoseOfAShardThatWasNeverLost) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(10);
  peers.Add(Lost(5));
  const auto journal = std::make_shared<MemoryJournal>();
  Begin(journal, &peers);
  Install(2);
  ExpectAverages(5);
  EXPECT_EQ(StatsOf(0).factor_version, 0u);
  EXPECT_EQ(StatsOf(0).state_bytes, 0) << "what it waits for has its memory";
  ExpectAverages(6);
  peers.WorkAll();
  EXPECT_EQ(StatsOf(0).factor_version, 7u) << "five of the lost shard, two that were put aside";
  for (uint64_t step = 7; step < 10; ++step) EXPECT_EQ(AnswersOf(step), expected[step]) << step;
  EXPECT_EQ(seen.layers, (std::map<TakeoverOutcome, int64_t>{{TakeoverOutcome::kAdopted, 2}}));
  EXPECT_EQ(seen.lost, 0);
}

TEST_F(ShardTakeoverTest, TheSameWithoutAJournalOfItsOwn) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(7);
  peers.Add(Lost(5));
  Begin(nullptr, &peers);
  Install(2);
  ExpectAverages(5);
  peers.WorkAll();
  EXPECT_EQ(AnswersOf(6), expected[6]);
}

TEST_F(ShardTakeoverTest, TheSameFromASnapshotAndTheRecordsSince) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(13);
  options.snapshot_interval_steps = 4;
  const std::shared_ptr<MemoryJournal> lost = Lost(11);
  ASSERT_EQ(lost->snapshots(), 2);
  peers.Add(lost);
  Begin(nullptr, &peers);
  Install(2);
  ExpectAverages(11);
  peers.WorkAll();
  EXPECT_EQ(AnswersOf(12), expected[12]);
}

TEST_F(ShardTakeoverTest, AStepThatIsHalfDoneMeetsTheFactorsWithItsOwnStatistics) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(6);
  peers.Add(Lost(5));
  Begin(nullptr, &peers);
  Install(2);
  for (uint32_t layer : {0, 1}) SendTo(layer, ContributionKind::kStatistics, 5);
  peers.WorkAll();
  for (uint32_t layer : {0, 1}) {
    const auto reply = SendTo(layer, ContributionKind::kGradient, 5);
    EXPECT_EQ((*reply->result)->factor_version, expected[5][layer].version);
    EXPECT_EQ(reply->values(), expected[5][layer].values);
  }
}

// The lost shard had applied step 4, and its answer had not arrived.
TEST_F(ShardTakeoverTest, StatisticsThatTheLostShardHadAppliedCountOnce) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(9);
  for (const uint64_t snapshots : {0, 1}) {
    for (const bool late : {false, true}) {
      MemoryPeers one;
      one.Add(Lost(5));
      options.snapshot_interval_steps = snapshots;
      const auto journal = std::make_shared<MemoryJournal>();
      Begin(journal, &one);
      Install(2);
      if (late) {
        one.WorkAll();
        EXPECT_EQ(AnswersOf(4), expected[4]) << "the answer that was on its way";
      } else {
        ExpectAverages(4);
        one.WorkAll();
      }
      EXPECT_EQ(StatsOf(0).factor_version, 5u);
      EXPECT_EQ(AnswersOf(5), expected[5]);
      for (uint64_t step = 6; step < 9; ++step) {
        Restart(journal, nullptr);
        EXPECT_EQ(AnswersOf(step), expected[step]) << step << " " << snapshots << late;
      }
      options.snapshot_interval_steps = 0;
    }
  }
}

TEST_F(ShardTakeoverTest, NeitherDoTheyWithTheShardAfterTheNext) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(7);
  for (const uint64_t snapshots : {0, 1}) {
    for (const bool sent_there : {false, true}) {
      MemoryPeers first, second;
      first.Add(Lost(5));
      options.snapshot_interval_steps = snapshots;
      const auto next = std::make_shared<MemoryJournal>();
      Begin(next, &first);
      Install(2);
      first.WorkAll();
      if (sent_there) AnswersOf(4);
      second.Add(next);
      Begin(nullptr, &second);
      Install(3);
      ExpectAverages(4);
      second.WorkAll();
      EXPECT_EQ(AnswersOf(5), expected[5]) << snapshots << sent_there;
      EXPECT_EQ(AnswersOf(6), expected[6]);
      options.snapshot_interval_steps = 0;
    }
  }
}

TEST_F(ShardTakeoverTest, StepsThatTheJobGoesBackToCountAnew) {
  enum class When { kBeforeTheMove, kWithTheMove, kWhileItAwaits, kLater };
  for (const When when : {When::kBeforeTheMove, When::kWithTheMove, When::kWhileItAwaits, When::kLater}) {
    went_back_epoch = 0;
    MemoryPeers one;
    one.Add(Lost(5));                                       // in epoch 1
    if (when == When::kBeforeTheMove) went_back_epoch = 2;  // the lost shard never heard of it
    Begin(std::make_shared<MemoryJournal>(), &one);
    if (when == When::kWithTheMove) {
      Install(3, /*released=*/false, 3);
    } else {
      Install(3);
    }
    if (when == When::kWhileItAwaits) Install(4, /*released=*/false, 3);
    if (when == When::kLater) {
      one.WorkAll();
      Install(4, /*released=*/false, 3);
      Step(3);
    } else {
      ExpectAverages(3);
      one.WorkAll();
    }
    EXPECT_EQ(StatsOf(0).factor_version, 6u) << static_cast<int>(when);
  }
}

TEST_F(ShardTakeoverTest, AShardThatWentBackItselfSaysWhatItAppliedSince) {
  auto lost = std::make_shared<MemoryJournal>();
  Begin(lost, nullptr);
  Install(1);
  for (uint64_t step = 0; step < 5; ++step) AnswersOf(step);
  Install(2, /*released=*/false, 3);
  AnswersOf(3);
  shard = nullptr;
  peers.Add(lost);
  Begin(nullptr, &peers);
  Install(3);
  ExpectAverages(3);
  ExpectAverages(4);
  peers.WorkAll();
  EXPECT_EQ(StatsOf(0).factor_version, 7u) << "five, step 3 again there, step 4 again here";
}

// Such factors change with answers, which are not in the log.
TEST_F(ShardTakeoverTest, FactorsMadeOfGradientsAloneGoOnFromTheSnapshot) {
  spec.method.name = "kron";
  options.snapshot_interval_steps = 4;
  const auto answer = [&](uint64_t step, uint32_t layer) { return SendTo(layer, ContributionKind::kGradient, step); };
  const auto run = [&](uint64_t from, uint64_t to) {
    for (uint64_t step = from; step < to; ++step) {
      for (uint32_t layer : {0, 1}) EXPECT_EQ(answer(step, layer)->decision(), Decision::kPreconditioned) << step;
    }
  };
  const auto lost = std::make_shared<MemoryJournal>();
  Begin(lost, nullptr);
  Install(1);
  run(0, 11);
  ASSERT_EQ(lost->snapshots(), 2);
  shard = nullptr;
  peers.Add(lost);
  Begin(std::make_shared<MemoryJournal>(), &peers);
  Install(2);
  EXPECT_EQ(answer(11, 0)->decision(), Decision::kIdentity);
  peers.WorkAll();
  EXPECT_EQ(StatsOf(0).factor_version, 8u);
  const auto first = answer(12, 0);
  EXPECT_EQ((*first->result)->factor_version, 9u);

  // The same gradients without the loss.
  Begin(nullptr, nullptr);
  Install(1);
  run(0, 8);
  ASSERT_TRUE(shard->Resume(Header(ContributionKind::kGradient, 12, 0, 0).key, 0).ok());
  EXPECT_EQ(answer(12, 0)->values(), first->values());
}

// At each job of the takeover the process ends, once, and comes back.
TEST_F(ShardTakeoverTest, ComesBackAsIfNothingHadHappenedWheneverItIsLostItself) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(12);
  const std::shared_ptr<MemoryJournal> lost = Lost(5);
  int jobs = 0;
  for (bool more = true; more; ++jobs) {
    ASSERT_LT(jobs, 20);
    MemoryPeers first, second;
    first.Add(lost);
    second.Add(lost);
    const auto journal = std::make_shared<MemoryJournal>();
    Begin(journal, &first);
    Install(2);
    ExpectAverages(5);
    ExpectAverages(6);
    for (int i = 0; i < jobs && more; ++i) more = first.Work();
    const bool none_yet = StatsOf(0).factor_version + StatsOf(1).factor_version == 0;
    Restart(journal, &second);
    EXPECT_EQ(SendTo(0, ContributionKind::kGradient, 6)->decision(), Decision::kIdentity) << "what it was";
    if (none_yet) {
      ExpectAverages(7);
    } else {
      Step(7);
    }
    second.WorkAll();
    for (uint64_t step = 8; step < 12; ++step) EXPECT_EQ(AnswersOf(step), expected[step]) << jobs << ": " << step;
    // Those that lie in its own journal by now are all that it needs.
    Restart(journal, nullptr);
    EXPECT_EQ(AnswersOf(12).size(), 2u);
    EXPECT_EQ(StatsOf(0).factor_version, 13u);
  }
  EXPECT_GT(jobs, 3);
}

TEST_F(ShardTakeoverTest, WithSnapshotsOfItsOwnItComesBackToo) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(30);
  options.snapshot_interval_steps = 4;
  for (uint64_t taken_at = 6; taken_at < 12; ++taken_at) {
    MemoryPeers one;
    one.Add(Lost(5));
    const auto journal = std::make_shared<MemoryJournal>();
    Begin(journal, &one);
    Install(2);
    for (uint64_t step = 5; step < taken_at; ++step) ExpectAverages(step);
    one.WorkAll();
    for (uint64_t step = taken_at; step < 22; ++step) {
      EXPECT_EQ(AnswersOf(step), expected[step]) << step;
      Restart(journal, nullptr);
    }
    EXPECT_GE(journal->snapshots(), 2);
  }
}

TEST_F(ShardTakeoverTest, WithNothingToBeFoundLayersBeginAnew) {
  Begin(std::make_shared<MemoryJournal>(), &peers);
  Install(2);
  ExpectAverages(5);
  peers.WorkAll();
  EXPECT_EQ(seen.layers, (std::map<TakeoverOutcome, int64_t>{{TakeoverOutcome::kNone, 2}}));
  // Step 5 was put aside.
  EXPECT_EQ(AnswersOf(6).at(0).version, 2u);
}

TEST_F(ShardTakeoverTest, OfTwoJournalsTheFirstThatIsWholeIsTaken) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(7);
  peers.Add(Lost(3), absl::DataLossError("torn"));
  peers.Add(Lost(5));
  peers.Add(Lost(4));
  Begin(nullptr, &peers);
  Install(2);
  ExpectAverages(5);
  peers.WorkAll();
  EXPECT_EQ(AnswersOf(6), expected[6]);
  EXPECT_EQ(seen.layers, (std::map<TakeoverOutcome, int64_t>{{TakeoverOutcome::kAdopted, 2}}));
}

TEST_F(ShardTakeoverTest, ARecordThatIsMissingCostsItsLayerAlone) {
  auto lost = std::make_shared<MemoryJournal>();
  Begin(lost, nullptr);
  Install(1);
  Step(0);
  lost->LoseNext(1);  // of layer 0
  Step(1);
  Step(2);
  shard = nullptr;
  peers.Add(lost);
  Begin(nullptr, &peers);
  Install(2);
  peers.WorkAll();
  EXPECT_EQ(seen.layers,
            (std::map<TakeoverOutcome, int64_t>{{TakeoverOutcome::kAdopted, 1}, {TakeoverOutcome::kDamaged, 1}}));
  EXPECT_EQ(StatsOf(0).factor_version, 0u);
  EXPECT_EQ(StatsOf(1).factor_version, 3u);
}

TEST_F(ShardTakeoverTest, FactorsThatCannotBeKeptAreNotTaken) {
  peers.Add(Lost(5));
  const auto journal = std::make_shared<MemoryJournal>();
  journal->set_adopts(absl::ResourceExhaustedError("disk full"));
  Begin(journal, &peers);
  Install(2);
  peers.WorkAll();
  EXPECT_EQ(seen.layers, (std::map<TakeoverOutcome, int64_t>{{TakeoverOutcome::kRefused, 2}}));
  EXPECT_EQ(AnswersOf(5).at(0).version, 1u);
}

TEST_F(ShardTakeoverTest, ReservesWhatItTakesAndGivesItBack) {
  const std::shared_ptr<MemoryJournal> lost = Lost(5);
  peers.Add(lost);
  Begin(std::make_shared<MemoryJournal>(), &peers);
  Install(2);
  EXPECT_EQ(shard->reserved_bytes(), SessionBytes() + ExtraBytes());
  ExpectAverages(5);
  peers.WorkAll();
  EXPECT_EQ(shard->reserved_bytes(), SessionBytes());
  ASSERT_TRUE(*shard->Remove(kSession));
  EXPECT_EQ(shard->reserved_bytes(), 0);

  // Without room for it layers begin anew at once.
  options.capacity_bytes = SessionBytes() + ExtraBytes() - 1;
  Begin(std::make_shared<MemoryJournal>(), &peers);
  Install(2);
  EXPECT_EQ(shard->reserved_bytes(), SessionBytes());
  EXPECT_FALSE(peers.Work());
  EXPECT_EQ(AnswersOf(5).at(0).version, 1u);
  EXPECT_EQ(seen.layers[TakeoverOutcome::kRefused], 2);
}

TEST_F(ShardTakeoverTest, ASessionThatEndsMeanwhileLeavesNothing) {
  for (int jobs = 0; jobs < 4; ++jobs) {
    MemoryPeers one;
    one.Add(Lost(5));
    Begin(std::make_shared<MemoryJournal>(), &one);
    Install(2);
    for (int i = 0; i < jobs; ++i) one.Work();
    ASSERT_TRUE(*shard->Remove(kSession));
    one.WorkAll();
    EXPECT_EQ(shard->reserved_bytes(), 0) << jobs;
    EXPECT_EQ(shard->in_flight(), 0);
  }
}

TEST_F(ShardTakeoverTest, ASessionInItsFirstEpochOrThatWaitsOrAnswersAllRanksLooksNowhere) {
  peers.Add(Lost(5));
  Begin(nullptr, &peers);
  Install(1);
  EXPECT_EQ(AnswersOf(0).at(0).version, 1u);
  spec.on_shard_loss = ShardLossPolicy::kWait;
  Begin(nullptr, &peers);
  Install(2);
  EXPECT_EQ(AnswersOf(0).at(0).version, 1u);
  spec.on_shard_loss = ShardLossPolicy::kDegrade;
  spec.world_size = 2;
  Begin(nullptr, &peers);
  Install(2);
  EXPECT_FALSE(peers.Work()) << "both would get each answer";
}

TEST_F(ShardTakeoverTest, MoreThanCanBePutAsideIsLostAndCounted) {
  const uint64_t lost_steps = 3, most = 32, interim = most + lost_steps;
  peers.Add(Lost(5));
  const auto journal = std::make_shared<MemoryJournal>();
  Begin(journal, &peers);
  Install(2);
  for (uint64_t step = 5; step < 5 + interim; ++step) ExpectAverages(step);
  EXPECT_EQ(seen.lost, static_cast<int64_t>(2 * lost_steps));
  peers.WorkAll();
  const std::vector<Answer> answers = AnswersOf(5 + interim);
  EXPECT_EQ(answers.at(0).version, 5 + most + 1);
  Restart(journal, nullptr);
  EXPECT_EQ(AnswersOf(5 + interim), answers) << "a replay puts the same aside";
}

TEST_F(ShardTakeoverTest, ReleasedMeanwhileItSendsAgainWhenFactorsAreNeeded) {
  for (const bool before_it_reads : {true, false}) {
    MemoryPeers one;
    one.Add(Lost(5));
    const auto journal = std::make_shared<MemoryJournal>();
    Begin(journal, &one);
    Install(2);
    ExpectAverages(5);
    if (!before_it_reads) one.Work();
    ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 100, .hold = false}).ok());
    one.WorkAll();
    Step(6, Mode::kFirstOrder);
    EXPECT_EQ(StatsOf(0).factor_version, 0u);
    Restart(journal, &one);
    ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 101, .hold = false}).ok());
    ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 102, .hold = true}).ok());
    one.WorkAll();
    EXPECT_EQ(AnswersOf(7).at(0).version, 6u) << "step 5 was given up with the return to first order";
    EXPECT_EQ(shard->reserved_bytes(), SessionBytes());
  }
}

TEST_F(ShardTakeoverTest, FactorsThatTheLostShardHadReleasedAreThereForTheReturn) {
  const std::vector<std::vector<Answer>> expected = Undisturbed(6);
  auto lost = std::make_shared<MemoryJournal>();
  Begin(lost, nullptr);
  Install(1);
  for (uint64_t step = 0; step < 5; ++step) Step(step);
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 9, .hold = false}).ok());
  shard = nullptr;
  peers.Add(lost);
  const auto journal = std::make_shared<MemoryJournal>();
  Begin(journal, &peers);
  Install(2, /*released=*/true);
  EXPECT_FALSE(peers.Work()) << "nobody needs them yet";
  Step(5, Mode::kFirstOrder);
  Restart(journal, &peers);
  ASSERT_TRUE(shard->HoldFactors({.session_id = kSession, .version = 10, .hold = true}).ok());
  peers.WorkAll();
  EXPECT_EQ(StatsOf(0).factor_version, 5u);
  for (uint32_t layer : {0, 1}) {
    SendTo(layer, ContributionKind::kStatistics, 6);
    const auto reply = SendTo(layer, ContributionKind::kGradient, 6);
    EXPECT_EQ((*reply->result)->factor_version, expected[5][layer].version);
  }
}

TEST_F(ShardTakeoverTest, UpdatesThatRanksKnowAndItsJournalDoesNotAreCounted) {
  spec.exchange = ExchangeMode::kDelegate;
  peers.Add(Lost(5));
  Begin(nullptr, &peers);
  Install(2);
  ASSERT_TRUE(shard->Resume(Header(ContributionKind::kGradient, 8, 0, 0).key, 8).ok());
  ASSERT_TRUE(shard->Resume(Header(ContributionKind::kGradient, 8, 0, 1).key, 5).ok());
  EXPECT_EQ(seen.lost, 0) << "nobody knows yet";
  peers.WorkAll();
  EXPECT_EQ(seen.lost, 3);
  EXPECT_EQ(Step(8).at(0)->decision(), Decision::kPreconditioned);
}

}  // namespace
}  // namespace precondor
