// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal: its records, writes that fail, and a restart from it.
#include <variant>

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CoordinatorJournalTest : public CoordinatorFixture {
 protected:
  static Mode ModeIn(const Directive& directive, uint64_t step) { return ModeAt(directive.modes, step); }
};

TEST_F(CoordinatorJournalTest, WorkersGetTheAddressThatTheOwnShardHasNow) {
  shards.resize(1);
  shards[0]->own = "127.0.0.1:1";
  MakeCoordinator();
  Open();
  shards[0]->own = "127.0.0.1:2";
  Restart();
  const auto joined = coordinator->JoinSession("job", 0, 5, 0);
  ASSERT_TRUE(joined.ok()) << joined.status();
  ASSERT_EQ(joined->shard_map.size(), 1u);
  EXPECT_EQ(joined->shard_map[0].address, "127.0.0.1:2");
  EXPECT_THAT(coordinator->ShardAddresses(), ElementsAre("127.0.0.1:2"));
}

TEST_F(CoordinatorJournalTest, NothingIsAnnouncedThatIsNotWrittenDown) {
  journal.fail = true;
  const absl::Status status = coordinator->OpenSession(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no space left"));
  EXPECT_TRUE(shards[0]->installed.empty() && shards[1]->installed.empty()) << "taken back";
  EXPECT_TRUE(coordinator->ListSessions().empty());

  journal.fail = false;
  const uint64_t id = Open();
  journal.fail = true;
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(coordinator->ListSessions()[0].joined, 0u);
  EXPECT_THAT(shards[0]->installed.at(id).members, ::testing::IsEmpty());
  journal.fail = false;
  JoinAll();
  journal.fail = true;
  EXPECT_FALSE(coordinator->CloseSession("job").ok());
  EXPECT_EQ(coordinator->ListSessions().size(), 1u) << "can be closed again";
  journal.fail = false;
  EXPECT_TRUE(*coordinator->CloseSession("job"));
}

TEST_F(CoordinatorJournalTest, RestoresSessionsMembersAndSchedule) {
  spec.fallback = {.policy = FallbackPolicy::kAtStep, .at_step = 12};
  spec.exchange = ExchangeMode::kDelegate;
  spec.delegates = {1, 1, 0, 1};
  const uint64_t id = Open();
  JoinAll();
  ASSERT_TRUE(coordinator->JoinSession("job", 1, 6, 3).ok());
  const CoordinatorSessionSummary before = coordinator->ListSessions()[0];
  Restart();
  ASSERT_EQ(coordinator->ListSessions().size(), 1u);
  const CoordinatorSessionSummary after = coordinator->ListSessions()[0];
  EXPECT_EQ(after.session_id, id);
  EXPECT_EQ(after.epoch, 2u);
  EXPECT_EQ(after.joined, 2u);
  EXPECT_EQ(after.spec, before.spec);
  EXPECT_EQ(after.modes, before.modes);
  EXPECT_EQ(after.shard_map.size(), before.shard_map.size());
  EXPECT_EQ(coordinator->JoinSession("job", 1, 5, 0).status().code(), absl::StatusCode::kFailedPrecondition)
      << "the fence outlives the process";
  EXPECT_EQ(ModeIn(coordinator->JoinSession("job", 1, 6, 3)->directive, 12), Mode::kFirstOrder);
  EXPECT_FALSE(coordinator->OpenSession(spec)->created);
  spec.name = "another";
  EXPECT_GT(Open(), id);
}

TEST_F(CoordinatorJournalTest, AnOpeningThatSeemedToFailIsReplacedByTheNext) {
  journal.fail = journal.lands = true;
  EXPECT_FALSE(coordinator->OpenSession(spec).ok());
  journal.fail = journal.lands = false;
  const uint64_t id = Open();
  Restart();
  ASSERT_EQ(coordinator->ListSessions().size(), 1u) << "one of the name";
  EXPECT_EQ(coordinator->ListSessions()[0].session_id, id);
  EXPECT_TRUE(*coordinator->CloseSession("job"));
  EXPECT_TRUE(coordinator->ListSessions().empty());
}

TEST_F(CoordinatorJournalTest, CandidateAnswersNothingBeforeItLeads) {
  const uint64_t id = Open();
  options.standby = true;
  MakeCoordinator();
  for (const absl::Status& status :
       {coordinator->OpenSession(spec).status(), coordinator->JoinSession("job", 0, 5, 0).status(),
        coordinator->ReportStep(Report(id, 1, 0, 0, 1)).status(), coordinator->LeaveSession(id, 0, 5),
        coordinator->CloseSession("job").status(), coordinator->SetMode("job", std::nullopt).status(),
        coordinator->GetSession("job").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(GetErrorReason(status), ErrorReason::kUnspecified) << "a client asks again, and may find who leads";
  }
  ASSERT_TRUE(coordinator->Restore(journal.records).ok());
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 5, 0).ok());
}

TEST_F(CoordinatorJournalTest, ClosedSessionsStayClosed) {
  Open();
  EXPECT_TRUE(*coordinator->CloseSession("job"));
  Restart();
  EXPECT_TRUE(coordinator->ListSessions().empty());
}

TEST_F(CoordinatorJournalTest, AClosingIsWrittenDownBeforeAnyShardRemoves) {
  Open();
  JoinAll();
  bool written = false;
  journal.during_append = [&](const CoordinatorRecord& record) {
    if (!std::holds_alternative<ClosingRecord>(record)) return;
    written = true;
    EXPECT_EQ(shards[0]->removals + shards[1]->removals, 0);
  };
  EXPECT_TRUE(*coordinator->CloseSession("job"));
  EXPECT_TRUE(written);
  EXPECT_TRUE(std::holds_alternative<CloseRecord>(journal.records.back()));
}

TEST_F(CoordinatorJournalTest, AClosingThatACrashInterruptsIsFinished) {
  const uint64_t id = Open();
  JoinAll();
  shards[1]->down = true;
  EXPECT_EQ(coordinator->CloseSession("job").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(shards[0]->installed.contains(id));
  EXPECT_TRUE(shards[1]->installed.contains(id));
  Restart();
  coordinator->Reconcile();
  EXPECT_TRUE(coordinator->ListSessions().empty());
  EXPECT_FALSE(shards[0]->installed.contains(id)) << "nothing is installed again";
  EXPECT_EQ(GetErrorReason(coordinator->JoinSession("job", 0, 6, 0).status()), ErrorReason::kUnknownSession);
  shards[1]->down = false;
  coordinator->Reconcile();
  EXPECT_FALSE(shards[1]->installed.contains(id));
  EXPECT_TRUE(std::holds_alternative<CloseRecord>(journal.records.back()));
  EXPECT_FALSE(*coordinator->CloseSession("job"));
}

TEST_F(CoordinatorJournalTest, AClosingOutlivesACompaction) {
  const uint64_t id = Open();
  shards[1]->during_remove = [] { return absl::UnavailableError("the answer is lost"); };
  EXPECT_FALSE(coordinator->CloseSession("job").ok());
  spec.name = "other";
  journal.compact_above = 0;
  Open();
  EXPECT_GE(journal.compactions, 1);
  Restart();
  shards[1]->during_remove = nullptr;
  coordinator->Reconcile();
  EXPECT_FALSE(shards[1]->installed.contains(id));
  ASSERT_EQ(coordinator->ListSessions().size(), 1u);
}

TEST_F(CoordinatorJournalTest, TheNameOfASessionThatEndsIsFree) {
  const uint64_t id = Open();
  shards[1]->down = true;
  EXPECT_FALSE(coordinator->CloseSession("job").ok());
  shards[1]->down = false;
  const uint64_t next = Open();
  EXPECT_NE(next, id);
  Restart();
  coordinator->Reconcile();
  ASSERT_EQ(coordinator->ListSessions().size(), 1u);
  EXPECT_EQ(coordinator->ListSessions()[0].session_id, next);
  for (const auto& shard : shards) EXPECT_FALSE(shard->installed.contains(id));
}

TEST_F(CoordinatorJournalTest, SessionOnAShardThatIsGoneIsAnError) {
  Open();
  shards.pop_back();
  MakeCoordinator();
  EXPECT_THAT(std::string(coordinator->Restore(journal.records).message()), HasSubstr("shard1"));
}

TEST_F(CoordinatorJournalTest, AnAddedShardTakesLayersOfLaterSessionsAlone) {
  const uint64_t id = Open();
  const auto layers = [&] {
    const std::vector<CoordinatorSessionSummary> sessions = coordinator->ListSessions();
    std::map<std::string, std::vector<uint32_t>> at;
    for (const ShardAssignment& one : sessions.at(0).shard_map) at[one.address] = one.layers;
    return at;
  };
  const auto before = layers();
  shards.push_back(std::make_shared<FakeShard>());
  Restart();
  coordinator->Reconcile();
  EXPECT_EQ(layers(), before);
  EXPECT_FALSE(shards.back()->installed.contains(id));
  spec.name = "later";
  const uint64_t later = Open();
  for (const auto& shard : shards) EXPECT_TRUE(shard->installed.contains(later));
}

TEST_F(CoordinatorJournalTest, LeasesGoOnAboveWhatWasPromised) {
  const uint64_t id = Open();
  JoinAll();
  uint64_t granted = 0;
  for (uint64_t step = 0; step < 30; ++step) granted = ReportAll(id, step)->lease_through_step;
  EXPECT_EQ(granted, 39u);
  Restart();
  const auto joined = coordinator->JoinSession("job", 0, 5, 30);
  ASSERT_TRUE(joined.ok());
  EXPECT_GE(joined->directive.lease_through_step, granted) << "a worker may rely on what it was told";
  EXPECT_TRUE(coordinator->ReportStep(Report(id, 1, 0, granted, 1)).ok());
}

TEST_F(CoordinatorJournalTest, LeasesEndWhereTheDiskDoes) {
  const uint64_t id = Open();
  JoinAll();
  journal.fail = true;
  uint64_t granted = 0;
  uint64_t step = 0;
  for (; step < 1000; ++step) {
    const auto directive = ReportAll(id, step);
    if (!directive.ok()) break;
    granted = directive->lease_through_step;
    if (granted < step + 1) break;
  }
  EXPECT_LT(step, 1000u) << "steps were granted that are in no journal";
  journal.fail = false;
  Restart();
  EXPECT_GE(coordinator->JoinSession("job", 0, 5, 0)->directive.lease_through_step, granted);
  EXPECT_GT(ReportAll(id, granted)->lease_through_step, granted) << "and go on when it is back";
}

TEST_F(CoordinatorJournalTest, FewReportsWaitForTheDisk) {
  const uint64_t id = Open();
  JoinAll();
  const size_t before = journal.records.size();
  for (uint64_t step = 0; step < 200; ++step) ASSERT_TRUE(ReportAll(id, step).ok());
  EXPECT_LE(journal.records.size() - before, 200u / 10) << "at most one write a lease";
}

TEST_F(CoordinatorJournalTest, ForcedModeBeginsAfterEveryGrantedStep) {
  const uint64_t id = Open();
  JoinAll();
  const uint64_t granted = ReportAll(id, 0)->lease_through_step;
  const auto set = coordinator->SetMode("job", Mode::kFirstOrder);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_THAT(set->modes,
              ElementsAre(ModeInterval{0, Mode::kSecondOrder}, ModeInterval{granted + 1, Mode::kFirstOrder}));
  Directive directive;
  for (uint64_t step = 1; step <= granted; ++step) directive = *ReportAll(id, step);
  EXPECT_EQ(ModeIn(directive, granted), Mode::kSecondOrder);
  EXPECT_EQ(ModeIn(directive, granted + 1), Mode::kFirstOrder);
  Restart();
  EXPECT_EQ(coordinator->GetSession("job")->modes, set->modes);
  EXPECT_EQ(coordinator->GetSession("job")->decision.state.forced, Mode::kFirstOrder);
  EXPECT_EQ(coordinator->SetMode("unknown", Mode::kFirstOrder).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CoordinatorJournalTest, NoStepIsGrantedWhileAChangeOfModeIsBeingWritten) {
  const uint64_t id = Open();
  JoinAll();
  const uint64_t granted = ReportAll(id, 0)->lease_through_step;
  bool reported = false;
  journal.during_append = [&](const CoordinatorRecord& record) {
    if (reported || !std::holds_alternative<LeaseRecord>(record)) return;
    reported = true;
    // A report that comes just now must not reach into what is about to change.
    EXPECT_EQ(coordinator->ReportStep(Report(id, 1, 0, 1, 1))->lease_through_step, granted);
  };
  EXPECT_EQ(coordinator->SetMode("job", Mode::kFirstOrder)->modes.back().first_step, granted + 1);
  EXPECT_TRUE(reported);
}

TEST_F(CoordinatorJournalTest, ChangeOfModeThatMayHaveBeenWrittenHoldsLeasesUntilItIsClear) {
  for (const bool lands : {false, true}) {
    SCOPED_TRACE(lands ? "it was" : "it was not");
    spec.name = lands ? "landed" : "lost";
    const uint64_t id = Open();
    JoinAll();
    const uint64_t granted = ReportAll(id, 0)->lease_through_step;
    journal.fail = true;
    journal.lands = lands;
    coordinator->SetMode(spec.name, Mode::kFirstOrder).IgnoreError();
    EXPECT_EQ(ReportAll(id, 1)->lease_through_step, granted) << "neither schedule may be relied on";
    journal.fail = false;
    Restart();
    const Directive directive = coordinator->JoinSession(spec.name, 0, 5, 0)->directive;
    EXPECT_EQ(ModeIn(directive, granted + 1), lands ? Mode::kFirstOrder : Mode::kSecondOrder);
    EXPECT_EQ(ModeIn(directive, granted), Mode::kSecondOrder);
  }
}

TEST_F(CoordinatorJournalTest, GoingBackIsWrittenDownBeforeShardsAndWorkersHearOfIt) {
  const uint64_t id = Open();
  JoinAll();
  shards[1]->gone = 40;
  journal.during_append = [&](const CoordinatorRecord& record) {
    const auto* membership = std::get_if<MembershipRecord>(&record);
    if (membership == nullptr || membership->membership.rollback_epoch != membership->membership.epoch) return;
    for (const auto& shard : shards) EXPECT_EQ(shard->installed.at(id).epoch, 1u);
  };
  const auto joined = coordinator->JoinSession("job", 1, 6, 40);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->epoch, 2u);
  EXPECT_EQ(joined->directive.rollback_epoch, 2u);
  EXPECT_EQ(joined->directive.resume_step, 40u);
  for (const auto& shard : shards) {
    EXPECT_EQ(shard->installed.at(id).rollback_epoch, 2u) << "all roll back, whichever shard said so";
    EXPECT_EQ(shard->installed.at(id).rollback_step, 40u);
    EXPECT_THAT(shard->fences, ElementsAre(2u));
  }
  shards[1]->gone.reset();
  Restart();
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0)->directive.rollback_epoch, 2u);
  ASSERT_TRUE(coordinator->JoinSession("job", 0, 7, 41).ok());
  for (const auto& shard : shards) {
    EXPECT_EQ(shard->installed.at(id).epoch, 3u);
    EXPECT_EQ(shard->installed.at(id).rollback_epoch, 2u) << "for a shard that has missed that install";
    EXPECT_EQ(shard->installed.at(id).rollback_step, 40u);
  }
}

TEST_F(CoordinatorJournalTest, EpochWaitsForAShardThatDoesNotAnswer) {
  const uint64_t id = Open();
  JoinAll();
  shards[1]->down = true;
  EXPECT_EQ(coordinator->JoinSession("job", 1, 6, 7).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(shards[0]->installed.at(id).epoch, 1u) << "fenced, not yet gone on";
  shards[1]->down = false;
  coordinator->Reconcile();
  for (const auto& shard : shards) {
    EXPECT_EQ(shard->installed.at(id).epoch, 2u);
    EXPECT_EQ(shard->installed.at(id).members[1].first_step, 7u);
  }
}

TEST_F(CoordinatorJournalTest, ReconcileInstallsWhatAShardLacksAndQuarantinesWhatNobodyKnows) {
  const uint64_t id = Open();
  JoinAll();
  shards[0]->installed.clear();  // it was restarted
  SessionInstall orphan;
  orphan.session_id = 99;
  shards[1]->installed[99] = orphan;
  Restart();
  coordinator->Reconcile();
  ASSERT_TRUE(shards[0]->installed.contains(id));
  EXPECT_EQ(shards[0]->installed.at(id).members.size(), 2u);
  EXPECT_FALSE(shards[1]->installed.contains(99));
  EXPECT_TRUE(shards[1]->quarantined.contains(99));
  const int installs = shards[0]->installs + shards[1]->installs;
  coordinator->Reconcile();
  EXPECT_EQ(shards[0]->installs + shards[1]->installs, installs) << "nothing is lacking";
}

TEST_F(CoordinatorJournalTest, CompactionKeepsWhatCounts) {
  spec.fallback.policy = FallbackPolicy::kNever;
  const uint64_t id = Open();
  JoinAll();
  journal.compact_above = 4;
  uint64_t granted = 0;
  for (uint64_t step = 0; step < 300; ++step) granted = ReportAll(id, step)->lease_through_step;
  EXPECT_GT(journal.compactions, 0);
  EXPECT_LE(journal.records.size(), 5u);
  Restart();
  EXPECT_EQ(coordinator->ListSessions()[0].joined, 2u);
  EXPECT_GE(coordinator->JoinSession("job", 0, 5, 0)->directive.lease_through_step, granted);
}

}  // namespace
}  // namespace precondor
