// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/coordinator.h"

#include <atomic>
#include <cmath>
#include <thread>

#include "kernels/base/session_memory.h"
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

using CoordinatorTest = CoordinatorFixture;

TEST_F(CoordinatorTest, OpenIsIdempotentByName) {
  const auto first = coordinator->OpenSession(spec);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->created);
  EXPECT_NE(first->session_id, 0u);
  EXPECT_EQ(first->spec.sketches, 8) << "the default, ceil(16 / 2), is filled in";
  const auto second = coordinator->OpenSession(spec);
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE(second->created);
  EXPECT_EQ(second->session_id, first->session_id);
  SessionSpec explicit_default = spec;
  explicit_default.sketches = 8;
  EXPECT_TRUE(coordinator->OpenSession(explicit_default).ok());
  EXPECT_EQ(shards[0]->installs, 1);
  EXPECT_EQ(observer.sessions, 1);
}

TEST_F(CoordinatorTest, ARankOnAShardsDeviceSendsItsLayers) {
  for (size_t s = 0; s < 2; ++s) shards[s]->ring_device = absl::StrCat("device ", s);
  spec.exchange = ExchangeMode::kDelegate;
  const std::vector<std::string> rank_devices = {"device 1", "device 0"};
  const auto opened = coordinator->OpenSession(spec, {}, rank_devices);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_THAT(opened->spec.delegates, ElementsAre(1, 0, 1, 0)) << "layer i is on shard i % 2";
  // Those who open it again get what was chosen, whatever they know of devices; and may name it.
  for (const std::vector<std::string>& known : {rank_devices, {}, {"device 0", "device 1"}}) {
    const auto again = coordinator->OpenSession(spec, {}, known);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->spec, opened->spec);
  }
  EXPECT_TRUE(coordinator->OpenSession(opened->spec).ok());
  SessionSpec other = opened->spec;
  other.delegates = {0, 1, 0, 1};
  EXPECT_THAT(coordinator->OpenSession(other), MessageIs(HasSubstr("delegates: have [1, 0, 1, 0], got [0, 1, 0, 1]")));
}

TEST_F(CoordinatorTest, DevicesChooseNoDelegatesInOtherExchangesAndNoneThatWereGiven) {
  for (size_t s = 0; s < 2; ++s) shards[s]->ring_device = absl::StrCat("device ", s);
  const std::vector<std::string> rank_devices = {"device 1", "device 0"};
  EXPECT_THAT(coordinator->OpenSession(spec, {}, rank_devices)->spec.delegates, ElementsAre());
  spec.name = "given";
  spec.exchange = ExchangeMode::kDelegate;
  spec.delegates = {0, 0, 0, 1};
  EXPECT_THAT(coordinator->OpenSession(spec, {}, rank_devices)->spec.delegates, ElementsAre(0, 0, 0, 1));
}

TEST_F(CoordinatorTest, RanksHaveOneDeviceEach) {
  const std::vector<std::string> one = {"a"}, long_name = {"a", std::string(65, 'x')};
  EXPECT_THAT(coordinator->OpenSession(spec, {}, one), MessageIs(HasSubstr("rank_devices: expected none or 2, got 1")));
  EXPECT_THAT(coordinator->OpenSession(spec, {}, long_name),
              MessageIs(HasSubstr("rank_devices: expected at most 64 bytes, got 65")));
}

TEST_F(CoordinatorTest, AnotherSpecUnderTheNameIsRefusedAndTheFieldNamed) {
  Open();
  spec.inv_freq = 77;
  EXPECT_THAT(coordinator->OpenSession(spec),
              StatusIs(absl::StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch, HasSubstr("inv_freq")));
}

TEST_F(CoordinatorTest, ChecksEverythingBeforeAskingShards) {
  SessionSpec bad = spec;
  bad.world_size = 0;
  EXPECT_EQ(coordinator->OpenSession(bad).status().code(), absl::StatusCode::kInvalidArgument);
  bad = spec;
  bad.method.name = "nonsense";
  EXPECT_EQ(coordinator->OpenSession(bad).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(shards[0]->installs + shards[1]->installs, 0);
  EXPECT_TRUE(coordinator->ListSessions().empty());
}

TEST_F(CoordinatorTest, SpreadsLayersAndNamesTheAddressesToDial) {
  shards[1]->advertise = "public:1";
  const uint64_t id = Open();
  const auto joined = coordinator->JoinSession("job", 0, 5, 0);
  ASSERT_TRUE(joined.ok());
  ASSERT_EQ(joined->shard_map.size(), 2u);
  EXPECT_EQ(joined->shard_map[0].address, "shard0");
  EXPECT_THAT(joined->shard_map[0].layers, ElementsAre(0, 2));
  EXPECT_EQ(joined->shard_map[1].address, "public:1");
  EXPECT_THAT(joined->shard_map[1].layers, ElementsAre(1, 3));
  EXPECT_THAT(shards[1]->installed[id].layers, ElementsAre(1, 3));
}

TEST_F(CoordinatorTest, FailedOpenLeavesNothingBehind) {
  shards[1]->refuse_installs = true;
  EXPECT_THAT(coordinator->OpenSession(spec), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("shard1")));
  EXPECT_TRUE(shards[0]->installed.empty());
  EXPECT_TRUE(coordinator->ListSessions().empty());
  shards[1]->refuse_installs = false;
  EXPECT_TRUE(coordinator->OpenSession(spec)->created);
}

TEST_F(CoordinatorTest, DeadShardMakesOpenUnavailable) {
  shards[1]->down = true;
  EXPECT_THAT(coordinator->OpenSession(spec), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("shard1")));
}

TEST_F(CoordinatorTest, MemoryThatDoesNotSufficeIsRefusedWithNumbers) {
  for (const auto& shard : shards) shard->capacity = 10;
  EXPECT_THAT(coordinator->OpenSession(spec), ReasonIs(ErrorReason::kCapacity, HasSubstr("has left is 10")));
}

TEST_F(CoordinatorTest, SessionsThatNobodyKnowsMakeRoomForNewOnes) {
  Open();
  // Left behind by a coordinator that is gone: without it the new session fits, with it it does not.
  for (const auto& shard : shards) {
    shard->installed[7].spec.name = "ghost";
    shard->capacity = 2 * FakeShard::kSessionBytes;
  }
  spec.name = "next";
  const auto opened = coordinator->OpenSession(spec);
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const auto& shard : shards) {
    EXPECT_FALSE(shard->installed.contains(7));
    EXPECT_EQ(shard->installed.size(), 2u) << "the first session is known and stays";
  }
}

TEST_F(CoordinatorTest, SessionsBeingOpenedAreNoOrphans) {
  uint64_t other = 0;
  shards[0]->during_install = [&] {
    shards[0]->during_install = nullptr;
    SessionSpec second = spec;
    second.name = "second";
    // The first one is on no shard's list but this one's, and not in the coordinator's table yet.
    shards[0]->installed[shards[0]->last_install].spec.name = spec.name;
    other = coordinator->OpenSession(second)->session_id;
  };
  const uint64_t first = Open();
  EXPECT_NE(other, 0u);
  EXPECT_TRUE(shards[0]->installed.contains(first));
  EXPECT_TRUE(shards[0]->installed.contains(other));
  EXPECT_EQ(shards[0]->removals, 0);
}

TEST_F(CoordinatorTest, SessionBecomesActiveWithTheLastRank) {
  const uint64_t id = Open();
  const auto first = coordinator->JoinSession("job", 0, 5, 0);
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(first->active);
  EXPECT_EQ(first->epoch, 1u);
  EXPECT_EQ(first->directive.lease_through_step, 10u);
  EXPECT_THAT(first->directive.modes, ElementsAre(ModeInterval{0, Mode::kSecondOrder}));
  const auto second = coordinator->JoinSession("job", 1, 5, 0);
  ASSERT_TRUE(second.ok());
  EXPECT_TRUE(second->active);
  EXPECT_EQ(second->epoch, 1u) << "filling the ranks is no new epoch";
  EXPECT_EQ(shards[0]->installed[id].members.size(), 2u) << "told before the reply";
}

TEST_F(CoordinatorTest, RestartedWorkerFencesTheOldOneWithANewEpoch) {
  const uint64_t id = Open();
  JoinAll();
  const int told = shards[0]->installs;
  EXPECT_EQ(coordinator->JoinSession("job", 1, 5, 0)->epoch, 1u);
  EXPECT_EQ(shards[0]->installs, told) << "the same incarnation changes nothing";
  const auto restarted = coordinator->JoinSession("job", 1, 6, 0);
  ASSERT_TRUE(restarted.ok());
  EXPECT_EQ(restarted->epoch, 2u);
  EXPECT_TRUE(restarted->active);
  EXPECT_EQ(shards[0]->installed[id].epoch, 2u);
  EXPECT_THAT(coordinator->JoinSession("job", 1, 5, 0), ReasonIs(ErrorReason::kStaleIncarnation));
  EXPECT_EQ(GetErrorReason(coordinator->ReportStep(Report(id, 2, 1, 0, 1)).status()), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(GetErrorReason(coordinator->ReportStep(Report(id, 1, 0, 0, 1)).status()), ErrorReason::kStaleEpoch);
  EXPECT_TRUE(coordinator->ReportStep(Report(id, 2, 0, 0, 1)).ok());
}

TEST_F(CoordinatorTest, JoinThatCouldNotTellAShardIsRepeated) {
  const uint64_t id = Open();
  shards[1]->down = true;
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0).status().code(), absl::StatusCode::kUnavailable);
  shards[1]->down = false;
  EXPECT_TRUE(shards[1]->installed[id].members.empty());
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 5, 0).ok());
  EXPECT_EQ(shards[1]->installed[id].members.size(), 1u);
}

TEST_F(CoordinatorTest, RefusesUnknownRanksSessionsAndIncarnations) {
  Open();
  EXPECT_EQ(GetErrorReason(coordinator->JoinSession("job", 2, 5, 0).status()), ErrorReason::kUnknownRank);
  EXPECT_EQ(GetErrorReason(coordinator->JoinSession("other", 0, 5, 0).status()), ErrorReason::kUnknownSession);
  EXPECT_EQ(coordinator->JoinSession("job", 0, 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetErrorReason(coordinator->ReportStep(Report(99, 1, 0, 0, 1)).status()), ErrorReason::kUnknownSession);
  EXPECT_EQ(GetErrorReason(coordinator->LeaveSession(99, 0, 5)), ErrorReason::kUnknownSession);
}

TEST_F(CoordinatorTest, RefusesNumbersThatLeaveNoRoomForLaterOnes) {
  const uint64_t id = Open();
  constexpr uint64_t kAll = ~uint64_t{0};
  EXPECT_THAT(
      coordinator->JoinSession("job", 0, 5, kAll),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("first_step: expected at most 281474976710656, got")));
  EXPECT_THAT(
      coordinator->JoinSession("job", 0, kAll, 0),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("incarnation: expected 1 ... 9223372036854775807, got")));
  JoinAll();
  StepReport report = Report(id, 1, 0, 0, 1);
  report.samples = kAll;
  EXPECT_THAT(coordinator->ReportStep(report),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("samples: expected at most")));
  report.samples = 1;
  EXPECT_TRUE(coordinator->ReportStep(report).ok());
}

TEST_F(CoordinatorTest, DescriptionsAndRanksAreCountedAndRefusedWithNumbers) {
  options.table_bytes = 2 * SessionTableBytes(spec);
  MakeCoordinator();
  Open();
  spec.name = "wide";
  spec.world_size = 65536;
  EXPECT_THAT(coordinator->OpenSession(spec),
              ReasonIs(ErrorReason::kCapacity,
                       AllOf(HasSubstr(absl::StrCat("keeps ", options.table_bytes)), HasSubstr("in 1 sessions"),
                             HasSubstr(absl::StrCat("needs ", SessionTableBytes(spec))))));
  spec.name = "next";
  spec.world_size = 2;
  ASSERT_TRUE(coordinator->OpenSession(spec).ok());
  spec.name = "last";
  EXPECT_EQ(GetErrorReason(coordinator->OpenSession(spec).status()), ErrorReason::kCapacity);
  ASSERT_TRUE(coordinator->CloseSession("next").ok());
  EXPECT_TRUE(coordinator->OpenSession(spec).ok()) << "its room is free again";
}

// A job that is restored begins at any step of a new session.
TEST_F(CoordinatorTest, TheFirstRanksOfASessionBeginAtTheStepOfTheirCheckpoint) {
  const uint64_t id = Open();
  const uint64_t none = coordinator->JoinSession("job", 0, 5, 1'000'000)->directive.lease_through_step;
  EXPECT_EQ(none, 10u) << "no step is made before all ranks are there";
  const auto joined = coordinator->JoinSession("job", 1, 5, 1'000'000);
  EXPECT_EQ(joined->directive.lease_through_step, 1'000'010u);
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 1'000'000)->directive.lease_through_step, 1'000'010u);
  EXPECT_TRUE(coordinator->ReportStep(Report(id, 1, 0, 1'000'000, 1)).ok());
}

// With a lease without end, a change of mode or a snapshot would be at the end of it.
TEST_F(CoordinatorTest, OneRankThatBeginsFarAheadGetsNoLeaseThere) {
  Open();
  ASSERT_TRUE(coordinator->JoinSession("job", 0, 5, uint64_t{1} << 48).ok());
  EXPECT_EQ(coordinator->JoinSession("job", 1, 5, 0)->directive.lease_through_step, 10u);
  EXPECT_THAT(coordinator->JoinSession("job", 0, 6, uint64_t{1} << 48),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("first_step: expected at most 16777226"), HasSubstr("got 281474976710656"))));
  EXPECT_EQ(coordinator->JoinSession("job", 0, 6, 20'000)->directive.lease_through_step, 10u) << "the other is at 0";
  EXPECT_EQ(coordinator->JoinSession("job", 1, 6, 20'000)->directive.lease_through_step, 20'010u)
      << "all have loaded a checkpoint of another run";
}

TEST_F(CoordinatorTest, ReportsAreAveragedOnceAndExtendTheLease) {
  const uint64_t id = Open();
  JoinAll();
  EXPECT_EQ(coordinator->ReportStep(Report(id, 1, 0, 7, 2.0))->lease_through_step, 17u);
  EXPECT_EQ(coordinator->ReportStep(Report(id, 1, 0, 7, 2.0))->lease_through_step, 17u);
  EXPECT_TRUE(observer.losses.empty());
  coordinator->ReportStep(Report(id, 1, 1, 7, 4.0)).IgnoreError();
  EXPECT_THAT(observer.losses, ElementsAre(std::make_pair(uint64_t{7}, 3.0)));
  EXPECT_EQ(coordinator->ReportStep(Report(id, 1, 1, 3, 4.0))->lease_through_step, 17u) << "not taken back";
  const auto sessions = coordinator->ListSessions();
  ASSERT_EQ(sessions.size(), 1u);
  EXPECT_EQ(sessions[0].last_step, 7u);
  EXPECT_EQ(sessions[0].loss, 3.0);
  EXPECT_EQ(sessions[0].joined, 2u);
}

TEST_F(CoordinatorTest, ListsTheGreatestStepThatEachShardHasToldInThisEpoch) {
  Open();
  coordinator->JoinSession("job", 0, 5, 0).IgnoreError();
  EXPECT_TRUE(coordinator->ListSessions()[0].shard_steps.empty());
  shards[0]->last_step = 12;
  shards[1]->last_step = 9;
  coordinator->Reconcile();
  EXPECT_THAT(coordinator->ListSessions()[0].shard_steps, ElementsAre(Pair("shard0", 12), Pair("shard1", 9)));
  coordinator->JoinSession("job", 1, 5, 0).IgnoreError();
  coordinator->JoinSession("job", 1, 6, 0).IgnoreError();
  EXPECT_TRUE(coordinator->ListSessions()[0].shard_steps.empty());
}

TEST_F(CoordinatorTest, TellsAStepOfNoFiniteLossToo) {
  const uint64_t id = Open();
  JoinAll();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator->ReportStep(Report(id, 1, rank, 0, std::nan(""))).ok());
  }
  ASSERT_EQ(observer.losses.size(), 1u);
  EXPECT_EQ(observer.losses[0].first, 0u);
  EXPECT_TRUE(std::isnan(observer.losses[0].second));
}

TEST_F(CoordinatorTest, TellsHowManyRanksAreInAsItChanges) {
  const uint64_t id = Open();
  Open();
  EXPECT_THAT(observer.events, ElementsAre("opened job", "job epoch 1: 0 of 2"));
  observer.events.clear();
  coordinator->JoinSession("job", 0, 5, 0).IgnoreError();
  coordinator->JoinSession("job", 0, 5, 0).IgnoreError();
  EXPECT_TRUE(coordinator->LeaveSession(id, 0, 5).ok());
  EXPECT_TRUE(*coordinator->CloseSession("job"));
  EXPECT_THAT(observer.events, ElementsAre("job epoch 1: 1 of 2", "job epoch 1: 0 of 2", "closed job"));
}

TEST_F(CoordinatorTest, LeftRankMayBeTakenAgainInANewEpoch) {
  const uint64_t id = Open();
  JoinAll();
  EXPECT_TRUE(coordinator->LeaveSession(id, 0, 5).ok());
  EXPECT_TRUE(coordinator->LeaveSession(id, 0, 5).ok()) << "repeated";
  EXPECT_EQ(coordinator->ListSessions()[0].joined, 1u);
  EXPECT_EQ(GetErrorReason(coordinator->ReportStep(Report(id, 1, 0, 0, 1)).status()), ErrorReason::kUnknownRank);
  EXPECT_EQ(GetErrorReason(coordinator->LeaveSession(id, 1, 4)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(GetErrorReason(coordinator->LeaveSession(id, 1, 9)), ErrorReason::kUnknownRank);
  const auto back = coordinator->JoinSession("job", 0, 8, 0);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->epoch, 2u);
  EXPECT_TRUE(back->active);
}

TEST_F(CoordinatorTest, CloseFreesTheShardsAndIsIdempotent) {
  const uint64_t id = Open();
  shards[1]->down = true;
  EXPECT_EQ(coordinator->CloseSession("job").status().code(), absl::StatusCode::kUnavailable);
  shards[1]->down = false;
  EXPECT_TRUE(*coordinator->CloseSession("job"));
  EXPECT_TRUE(shards[0]->installed.empty() && shards[1]->installed.empty());
  EXPECT_FALSE(*coordinator->CloseSession("job"));
  EXPECT_EQ(observer.sessions, 0);
  EXPECT_GT(Open(), id) << "a handle is never given out twice";
}

TEST_F(CoordinatorTest, DrainingRefusesNewSessionsAlone) {
  Open();
  coordinator->BeginDrain();
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 5, 0).ok());
  SessionSpec other = spec;
  other.name = "other";
  EXPECT_THAT(coordinator->OpenSession(other), StatusIs(absl::StatusCode::kUnavailable, ErrorReason::kDraining));
}

TEST_F(CoordinatorTest, AShardThatDoesNotAnswerIsReportedOnceAndWhenItAnswersAgain) {
  shards.push_back(std::make_shared<FakeShard>());
  MakeCoordinator();
  // Rounds of a second each, as a server makes them.
  const auto reconcile = [&](int rounds) {
    for (int i = 0; i < rounds; ++i) {
      coordinator->Reconcile();
      clock.Advance(absl::Seconds(1));
    }
  };
  shards[1]->down = shards[2]->down = true;
  reconcile(2);
  EXPECT_THAT(logger.lines, IsEmpty()) << "two probes may be lost";
  EXPECT_EQ(observer.unreachable, 0);
  reconcile(5);
  EXPECT_THAT(logger.lines, ElementsAre("shard does not answer shard1", "shard does not answer shard2"));
  EXPECT_EQ(observer.unreachable, 2);
  shards[1]->down = false;
  reconcile(3);
  EXPECT_THAT(logger.lines, ElementsAre("shard does not answer shard1", "shard does not answer shard2",
                                        "shard answers again shard1"));
  EXPECT_EQ(observer.unreachable, 1);
}

TEST_F(CoordinatorTest, HoldsNoLockWhileAskingShards) {
  const uint64_t id = Open();
  coordinator->JoinSession("job", 0, 5, 0).IgnoreError();
  bool answered = false;
  shards[0]->during_install = [&] {
    answered = coordinator->ReportStep(Report(id, 1, 0, 1, 1.0)).ok() && coordinator->ListSessions().size() == 1;
  };
  EXPECT_TRUE(coordinator->JoinSession("job", 1, 5, 0).ok());
  EXPECT_TRUE(answered);
}

TEST_F(CoordinatorTest, ConcurrentOpensAndJoinsAgree) {
  spec.world_size = 4;
  std::atomic<int> created = 0;
  std::atomic<int> active = 0;
  std::vector<std::thread> workers;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    workers.emplace_back([&, rank] {
      const auto opened = coordinator->OpenSession(spec);
      if (opened.ok() && opened->created) ++created;
      const auto joined = coordinator->JoinSession("job", rank, 5, 0);
      if (joined.ok() && joined->active) ++active;
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(created.load(), 1);
  EXPECT_EQ(active.load(), 1) << "the last to join sees the session active";
  EXPECT_EQ(coordinator->ListSessions()[0].epoch, 1u);
}

}  // namespace
}  // namespace precondor
