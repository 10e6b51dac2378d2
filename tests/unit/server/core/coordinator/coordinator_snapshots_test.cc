// SPDX-License-Identifier: Apache-2.0
// Snapshots of whole sessions as the coordinator sees them.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CoordinatorSnapshotsTest : public CoordinatorFixture {
 protected:
  uint64_t OpenAndJoin() {
    const uint64_t id = Open();
    JoinAll();
    return id;
  }
  Directive ReportAll(uint64_t id, uint64_t step) {
    const auto reported = CoordinatorFixture::ReportAll(id, step);
    EXPECT_TRUE(reported.ok()) << reported.status();
    return reported.value_or(Directive());
  }
  void MakeDurable(size_t shard, uint64_t snapshot_id) {
    shards[shard]->progress = {.begun = true, .durable = true, .snapshot_id = snapshot_id};
  }
  void MakeAllDurable(uint64_t snapshot_id) {
    for (size_t s = 0; s < shards.size(); ++s) MakeDurable(s, snapshot_id);
  }
  std::vector<SnapshotEntry> Listed() const { return coordinator->GetSession("job")->snapshots; }
  // Takes one that is complete.
  void Complete(uint64_t id, uint64_t step) {
    for (auto& shard : shards) shard->progress = {};
    ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
    ReportAll(id, step);
    MakeAllDurable(step + 1);
    coordinator->Reconcile();
    ASSERT_EQ(Listed().back().state, SnapshotState::kComplete);
  }
};

TEST_F(CoordinatorSnapshotsTest, OneStepBeyondEveryLeaseForAllShards) {
  const uint64_t id = OpenAndJoin();
  const uint64_t granted = ReportAll(id, 0).lease_through_step;
  const auto begun = coordinator->CreateSnapshot("job");
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_EQ(begun->step, granted + 1);
  EXPECT_EQ(begun->number, 1u);
  for (const auto& shard : shards) {
    ASSERT_EQ(shard->orders.size(), 1u);
    EXPECT_EQ(shard->orders[0].session_id, id);
    EXPECT_EQ(shard->orders[0].step, granted + 1);
    EXPECT_EQ(shard->orders[0].number, 1u);
    EXPECT_FALSE(shard->orders[0].repeated);
  }
  // A rank to which the step is granted hears of it with the grant.
  const Directive directive = ReportAll(id, 1);
  EXPECT_GE(directive.lease_through_step, granted + 1);
  EXPECT_EQ(directive.snapshot_at, granted + 1);
  EXPECT_EQ(directive.snapshot_number, 1u);
  EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0)->directive.snapshot_at, granted + 1);
}

TEST_F(CoordinatorSnapshotsTest, NoLeaseReachesTheStepBeforeAllShardsKnow) {
  const uint64_t id = OpenAndJoin();
  const uint64_t granted = ReportAll(id, 0).lease_through_step;
  uint64_t meanwhile = 0;
  shards[1]->during_order = [&] {
    const Directive directive = ReportAll(id, 1);
    meanwhile = directive.lease_through_step;
    EXPECT_EQ(directive.snapshot_at, 0u);
  };
  ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
  EXPECT_EQ(meanwhile, granted);
  EXPECT_EQ(ReportAll(id, 2).lease_through_step, 2 + options.lease_steps);
}

TEST_F(CoordinatorSnapshotsTest, IsCompleteOnceEveryPartIsDurable) {
  const uint64_t id = OpenAndJoin();
  ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
  coordinator->Reconcile();
  ASSERT_EQ(Listed().size(), 1u);
  EXPECT_EQ(Listed()[0].state, SnapshotState::kUnderWay);
  MakeDurable(0, 7);
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kUnderWay) << "half of it";
  MakeDurable(1, 3);
  coordinator->Reconcile();
  const SnapshotEntry snapshot = Listed()[0];
  EXPECT_EQ(snapshot.state, SnapshotState::kComplete);
  EXPECT_EQ(snapshot.epoch, 1u);
  ASSERT_EQ(snapshot.parts.size(), 2u);
  EXPECT_EQ(snapshot.parts[0], (SnapshotPart{"shard0", 7, shards[0]->installed[id].layers}));
  EXPECT_EQ(snapshot.parts[1], (SnapshotPart{"shard1", 3, shards[1]->installed[id].layers}));
  EXPECT_TRUE(shards[0]->orders.back().repeated);
  const size_t orders = shards[0]->orders.size();
  coordinator->Reconcile();
  EXPECT_EQ(shards[0]->orders.size(), orders) << "nothing is left to ask";
}

TEST_F(CoordinatorSnapshotsTest, AShardThatCannotTakeItsPartFailsIt) {
  const uint64_t id = OpenAndJoin();
  shards[1]->order_status = absl::FailedPreconditionError("no data directory");
  EXPECT_THAT(coordinator->CreateSnapshot("job"),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("shard shard1: no data directory")));
  ASSERT_EQ(Listed().size(), 1u);
  EXPECT_EQ(Listed()[0].state, SnapshotState::kFailed);
  EXPECT_THAT(Listed()[0].reason, HasSubstr("shard1"));
  const Directive directive = ReportAll(id, 0);
  EXPECT_EQ(directive.snapshot_at, 0u);
  EXPECT_EQ(directive.lease_through_step, options.lease_steps) << "leases go on";
  // One that is lost while it is under way.
  shards[1]->order_status = absl::OkStatus();
  ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(coordinator->CreateSnapshot("job").status())) << "one at a time";
  shards[1]->order_status = absl::UnavailableError("down");
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[1].state, SnapshotState::kUnderWay) << "it may come back with its part";
  shards[1]->order_status = absl::FailedPreconditionError("restarted before it was durable");
  MakeDurable(0, 1);
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[1].state, SnapshotState::kFailed);
  EXPECT_THAT(Listed()[1].reason, HasSubstr("shard shard1: restarted"));
}

TEST_F(CoordinatorSnapshotsTest, AStepThatAShardNeverSawFailsIt) {
  const uint64_t id = OpenAndJoin();
  const uint64_t step = coordinator->CreateSnapshot("job")->step;
  for (uint64_t at = 0; at < step + options.lease_steps; ++at) ReportAll(id, at);
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kUnderWay);
  ReportAll(id, step + options.lease_steps);
  shards[0]->progress = {.begun = true, .durable = false, .snapshot_id = 0};
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kFailed);
  EXPECT_THAT(Listed()[0].reason, HasSubstr("shard1"));
}

TEST_F(CoordinatorSnapshotsTest, AJobThatGoesBackFailsWhatIsUnderWay) {
  const uint64_t id = OpenAndJoin();
  ReportAll(id, 0);
  ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
  shards[0]->gone = 0;
  ASSERT_TRUE(coordinator->JoinSession("job", 1, 6, 0).ok());
  MakeAllDurable(1);
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kFailed) << "its parts could be of two histories";
  EXPECT_THAT(Listed()[0].reason, HasSubstr("rolled back to step 0"));
}

TEST_F(CoordinatorSnapshotsTest, SurvivesTheCoordinator) {
  const uint64_t id = OpenAndJoin();
  const uint64_t first = coordinator->CreateSnapshot("job")->step;
  ASSERT_NO_FATAL_FAILURE();
  for (const bool compacted : {false, true}) {
    if (compacted) {
      journal.compact_above = 0;
      ReportAll(id, 0);
      ASSERT_TRUE(coordinator->SetMode("job", Mode::kSecondOrder).ok());
      journal.compact_above = 1000;
    }
    Restart();
    ASSERT_EQ(Listed().size(), 1u);
    EXPECT_EQ(Listed()[0].state, SnapshotState::kUnderWay);
    EXPECT_EQ(coordinator->JoinSession("job", 0, 5, 0)->directive.snapshot_at, first);
  }
  EXPECT_GT(journal.compactions, 0);
  MakeDurable(0, 4);
  MakeDurable(1, 5);
  coordinator->Reconcile();
  EXPECT_TRUE(shards[0]->orders.back().repeated) << "a shard that knows nothing of it must not begin it now";
  EXPECT_EQ(Listed()[0].state, SnapshotState::kComplete);
  Restart();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kComplete);
  EXPECT_EQ(Listed()[0].parts[1].snapshot_id, 5u);
}

TEST_F(CoordinatorSnapshotsTest, TheObserverHearsOfEachOnceAndOfTheLastCompleteOne) {
  const uint64_t id = OpenAndJoin();
  shards[1]->order_status = absl::FailedPreconditionError("no data directory");
  EXPECT_FALSE(coordinator->CreateSnapshot("job").ok());
  EXPECT_EQ(observer.failed_snapshots, 1);
  EXPECT_EQ(observer.complete_snapshots, 0);
  EXPECT_FALSE(observer.last_snapshot.has_value());
  shards[1]->order_status = absl::OkStatus();
  Complete(id, 0);
  const uint64_t first = Listed().back().step;
  coordinator->Reconcile();
  EXPECT_EQ(observer.complete_snapshots, 1);
  EXPECT_EQ(observer.last_snapshot, first);
  ReportAll(id, 1);
  Complete(id, 2);
  EXPECT_EQ(observer.complete_snapshots, 2);
  EXPECT_GT(observer.last_snapshot, first);
  EXPECT_EQ(observer.last_snapshot, Listed().back().step);
  EXPECT_EQ(observer.failed_snapshots, 1);
  // One that comes back from its journal knows the step; it has taken none itself.
  observer.last_snapshot.reset();
  Restart();
  EXPECT_EQ(observer.last_snapshot, Listed().back().step);
  EXPECT_EQ(observer.complete_snapshots, 2);
}

TEST_F(CoordinatorSnapshotsTest, ADiskThatFailsBeginsNothing) {
  const uint64_t id = OpenAndJoin();
  journal.fail = true;
  EXPECT_TRUE(absl::IsUnavailable(coordinator->CreateSnapshot("job").status()));
  EXPECT_THAT(shards[0]->orders, IsEmpty());
  journal.fail = false;
  EXPECT_THAT(Listed(), IsEmpty());
  EXPECT_EQ(ReportAll(id, 0).lease_through_step, options.lease_steps);
  ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
  MakeAllDurable(1);
  journal.fail = true;
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kUnderWay) << "not before it is written";
  journal.fail = false;
  coordinator->Reconcile();
  EXPECT_EQ(Listed()[0].state, SnapshotState::kComplete);
}

TEST_F(CoordinatorSnapshotsTest, ShardsAreToldWhichToKeep) {
  const uint64_t id = OpenAndJoin();
  for (uint64_t step = 0; step < 3; ++step) ASSERT_NO_FATAL_FAILURE(Complete(id, step));
  ASSERT_EQ(Listed().size(), 2u);
  EXPECT_EQ(Listed()[0].number, 2u);
  for (auto& shard : shards) shard->progress = {};
  ASSERT_TRUE(coordinator->CreateSnapshot("job").ok());
  EXPECT_THAT(shards[0]->orders.back().keep, ElementsAre(2, 3));
}

TEST_F(CoordinatorSnapshotsTest, ThePolicyTakesThemByItself) {
  options.snapshot_interval_steps = 50;
  MakeCoordinator();
  const uint64_t id = OpenAndJoin();
  std::vector<uint64_t> cuts;
  for (uint64_t step = 0; step < 150; ++step) {
    ReportAll(id, step);
    coordinator->Reconcile();
    if (Listed().empty() || Listed().back().state != SnapshotState::kUnderWay) continue;
    cuts.push_back(Listed().back().step);
    MakeAllDurable(step);
    coordinator->Reconcile();
    for (auto& shard : shards) shard->progress = {};
  }
  EXPECT_THAT(cuts, ElementsAre(50, 100, 150));
}

TEST_F(CoordinatorSnapshotsTest, NobodyJoinsASessionBeforeItIsRestored) {
  const auto restoring = coordinator->RestoreSession(spec, 640);
  ASSERT_TRUE(restoring.ok()) << restoring.status();
  EXPECT_FALSE(restoring->secret.empty());
  ASSERT_EQ(restoring->session.snapshots.size(), 1u);
  EXPECT_EQ(restoring->session.snapshots[0].step, 640u);
  EXPECT_EQ(restoring->session.shard_map.size(), 2u);
  for (const auto& shard : shards) {
    ASSERT_EQ(shard->orders.size(), 1u);
    EXPECT_TRUE(shard->orders[0].restores);
    EXPECT_EQ(shard->orders[0].step, 640u);
  }
  EXPECT_TRUE(absl::IsUnavailable(coordinator->JoinSession("job", 0, 5, 640).status()));
  MakeDurable(0, 1);
  coordinator->Reconcile();
  Restart();
  EXPECT_TRUE(absl::IsUnavailable(coordinator->JoinSession("job", 0, 5, 640).status())) << "half of it";
  MakeDurable(1, 1);
  coordinator->Reconcile();
  ASSERT_TRUE(coordinator->JoinSession("job", 0, 5, 640).ok());
  const auto joined = coordinator->JoinSession("job", 1, 5, 640);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_GE(joined->directive.lease_through_step, 640u);
  EXPECT_THAT(coordinator->RestoreSession(spec, 640), StatusIs(absl::StatusCode::kFailedPrecondition));
  spec.layers[0].d_in = 5;
  EXPECT_EQ(GetErrorReason(coordinator->RestoreSession(spec, 640).status()), ErrorReason::kSpecMismatch);
}

TEST_F(CoordinatorSnapshotsTest, ARestoreThatFailedKeepsEverybodyOut) {
  ASSERT_TRUE(coordinator->RestoreSession(spec, 640).ok());
  shards[1]->order_status = absl::FailedPreconditionError("restarted before it was durable");
  coordinator->Reconcile();
  EXPECT_THAT(coordinator->JoinSession("job", 0, 5, 640),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("shard shard1: restarted")));
  EXPECT_TRUE(absl::IsDataLoss(coordinator->CreateSnapshot("job").status()));
  shards[1]->order_status = absl::OkStatus();
  ASSERT_TRUE(*coordinator->CloseSession("job"));
  EXPECT_TRUE(coordinator->RestoreSession(spec, 640).ok());
}

TEST_F(CoordinatorSnapshotsTest, UnknownSessionsAreNamed) {
  EXPECT_THAT(coordinator->CreateSnapshot("other"),
              StatusIs(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession));
}

}  // namespace
}  // namespace precondor
