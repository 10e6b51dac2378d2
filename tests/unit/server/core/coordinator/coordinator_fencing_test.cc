// SPDX-License-Identifier: Apache-2.0
// Several coordinators take themselves for the leader, and only one changes what is on shards.
#include <memory>
#include <utility>

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

class CoordinatorFencingTest : public CoordinatorFixture {
 protected:
  // Another process on the journal that `journal_in_use` is; the one before stays, as one that was paused.
  void Succeed() {
    paused = std::move(coordinator);
    Restart();
  }
  int Calls() const { return shards[0]->calls + shards[1]->calls; }

  std::unique_ptr<Coordinator> paused;
};

TEST_F(CoordinatorFencingTest, APausedLeaderTouchesNothingOfItsSuccessor) {
  std::vector<absl::Status> reasons;
  options.on_replaced = [&](const absl::Status& why) { reasons.push_back(why); };
  MakeCoordinator();
  ASSERT_TRUE(coordinator->Restore({}).ok());
  Succeed();
  const uint64_t id = Open();  // of which the paused one knows nothing
  paused->Reconcile();
  for (const auto& shard : shards) {
    EXPECT_TRUE(shard->installed.contains(id));
    EXPECT_EQ(shard->removals, 0);
  }
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_EQ(GetErrorReason(reasons[0]), ErrorReason::kStaleLeader);

  // It has stopped: it tells this to each caller, and calls no shard any more.
  const int calls = Calls();
  EXPECT_THAT(paused->OpenSession(spec), StatusIs(absl::StatusCode::kUnavailable, ErrorReason::kUnspecified))
      << "a client asks again, and may find who leads";
  paused->Reconcile();
  paused->ProbeShard(0);
  EXPECT_EQ(Calls(), calls);
  EXPECT_EQ(reasons.size(), 1u);
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 5, 0).ok()) << "the successor goes on";
}

TEST_F(CoordinatorFencingTest, ACallThatIsRefusedChangesNothingAndEndsTheLead) {
  const uint64_t id = Open();
  Succeed();
  coordinator->Reconcile();
  EXPECT_EQ(paused->CloseSession("job").status().code(), absl::StatusCode::kUnavailable);
  for (const auto& shard : shards) EXPECT_TRUE(shard->installed.contains(id));
  EXPECT_EQ(paused->JoinSession("job", 0, 5, 0).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(CoordinatorFencingTest, TheTokenGrowsWithEachStartAndIsWrittenDownFirst) {
  uint64_t last = 0;
  for (int start = 0; start < 4; ++start) {
    // A clock that is set back makes no token smaller.
    if (start == 2) clock.Advance(-absl::Milliseconds(500));
    if (start == 3) journal.compact_above = 0;
    journal.during_append = [&](const CoordinatorRecord& record) {
      const auto* lead = std::get_if<LeaderRecord>(&record);
      if (lead == nullptr) return;
      EXPECT_GT(lead->token, last);
      EXPECT_EQ(shards[0]->leader, last) << "written before any shard is called";
    };
    Restart();
    coordinator->Reconcile();
    EXPECT_GT(shards[0]->leader, last);
    EXPECT_EQ(shards[1]->leader, shards[0]->leader);
    last = shards[0]->leader;
    spec.name = "job" + std::to_string(start);
    Open();
  }
  EXPECT_GE(journal.compactions, 1);
  Succeed();
  coordinator->Reconcile();
  EXPECT_GT(shards[0]->leader, last) << "a compaction keeps it";
}

TEST_F(CoordinatorFencingTest, WithoutAJournalThatTakesItNobodyLeads) {
  journal.fail = true;
  EXPECT_THAT(coordinator->Restore({}), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(Calls(), 0);
}

TEST_F(CoordinatorFencingTest, StorageThatElectsALeaderGivesTheToken) {
  journal.elected = 77;
  ASSERT_TRUE(coordinator->Restore({}).ok());
  EXPECT_TRUE(journal.records.empty());
  coordinator->Reconcile();
  EXPECT_EQ(shards[0]->leader, 77u);
}

class CoordinatorQuarantineTest : public CoordinatorFixture {
 protected:
  void RestartLater() {
    clock.Advance(absl::Seconds(1));
    Restart();
    coordinator->Reconcile();
  }
};

TEST_F(CoordinatorQuarantineTest, RemovesWhatItGaveUpItself) {
  shards[1]->refuse_installs = true;
  EXPECT_FALSE(coordinator->OpenSession(spec).ok());
  const uint64_t id = shards[1]->last_install;
  SessionInstall late;
  late.session_id = id;
  shards[1]->installed[id] = late;  // a call that was given up on
  coordinator->Reconcile();
  EXPECT_FALSE(shards[1]->installed.contains(id));
  EXPECT_TRUE(shards[1]->quarantined.empty());
}

TEST_F(CoordinatorQuarantineTest, LeadsWithoutItsJournalUnlessTheClockIsBehind) {
  const uint64_t id = Open();
  journal.records.clear();
  RestartLater();
  for (const auto& shard : shards) EXPECT_TRUE(shard->quarantined.contains(id));
  const uint64_t token = shards[0]->leader;
  journal.records.clear();
  RestartLater();
  EXPECT_GT(shards[0]->leader, token);
  journal.records.clear();
  clock.SetWall(-absl::Hours(1));
  RestartLater();
  EXPECT_EQ(coordinator->OpenSession(spec).status().code(), absl::StatusCode::kUnavailable);
  for (const auto& shard : shards) shard->leader = 0;  // as docs/operate/operations.md says: their files are removed
  RestartLater();
  EXPECT_TRUE(coordinator->OpenSession(spec).ok());
}

}  // namespace

}  // namespace precondor
