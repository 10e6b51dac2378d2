// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_snapshots.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<PlacedLayers> TwoShards() {
  return {{.shard = "a", .address = "a:1", .layers = {0, 2}},
          {.shard = "b", .address = "b:1", .layers = {1}},
          {.shard = "c", .address = "c:1", .layers = {}}};
}

TEST(SessionSnapshotsTest, OneAfterTheOther) {
  SessionSnapshots snapshots("run");
  absl::StatusOr<SnapshotEntry> first = snapshots.Plan(7, 2, TwoShards());
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->number, 1u);
  EXPECT_EQ(first->parts.size(), 2u) << "a shard without layers has no part";
  EXPECT_TRUE(snapshots.list().empty()) << "a plan changes nothing";
  snapshots.Adopt({*first});
  EXPECT_THAT(snapshots.Plan(9, 2, TwoShards()).status().message(), HasSubstr("under way"));
  EXPECT_FALSE(snapshots.IsDue(1, 100));
  first->state = SnapshotState::kComplete;
  snapshots.Adopt({*first});
  const absl::StatusOr<SnapshotEntry> second = snapshots.Plan(9, 2, TwoShards());
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->number, 2u);
  EXPECT_THAT(snapshots.MakeOrder(5, *second, true).keep, ElementsAre(1u));
  EXPECT_FALSE(snapshots.IsDue(10, 16));
  EXPECT_TRUE(snapshots.IsDue(10, 17));
  EXPECT_FALSE(snapshots.IsDue(0, 17));
}

TEST(SessionSnapshotsTest, ASessionThatIsRestoredWaitsForItsFactors) {
  SessionSnapshots snapshots("run");
  SessionSpec spec;
  const SessionMembers members("run", SessionMembers::First(spec));
  absl::StatusOr<SnapshotEntry> restore = snapshots.PlanRestore(7, members, TwoShards());
  ASSERT_TRUE(restore.ok());
  EXPECT_TRUE(snapshots.CheckRestored().ok());
  snapshots.Adopt({*restore});
  EXPECT_EQ(GetErrorReason(snapshots.CheckRestored()), ErrorReason::kNotActive);
  EXPECT_TRUE(absl::IsFailedPrecondition(snapshots.PlanRestore(7, members, TwoShards()).status()));
  restore->state = SnapshotState::kFailed;
  snapshots.Adopt({*restore});
  EXPECT_TRUE(absl::IsDataLoss(snapshots.CheckRestored()));
  EXPECT_TRUE(absl::IsDataLoss(snapshots.Plan(9, 1, TwoShards()).status()));
  restore->state = SnapshotState::kComplete;
  snapshots.Adopt({*restore});
  EXPECT_TRUE(snapshots.CheckRestored().ok());
}

TEST(SessionSnapshotsTest, ARollbackEndsOneThatIsUnderWay) {
  const SnapshotEntry snapshot = *SessionSnapshots("run").Plan(7, 2, TwoShards());
  Membership membership;
  EXPECT_EQ(SessionSnapshots::WhyNotWhole(snapshot, membership), std::nullopt);
  membership.rollback_epoch = 3;
  EXPECT_THAT(SessionSnapshots::WhyNotWhole(snapshot, membership).value_or(""), HasSubstr("rolled back"));
}

}  // namespace
}  // namespace precondor
