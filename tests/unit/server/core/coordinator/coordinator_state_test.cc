// SPDX-License-Identifier: Apache-2.0
// A session is opened, open, ending and abandoned; and what a journal makes of it.
#include "server/core/coordinator/coordinator_state.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_members.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::shared_ptr<CoordinatorSession> MakeSession(uint64_t id, const std::string& name) {
  SessionSpec spec;
  spec.name = name;
  const SessionRecord record{.session_id = id,
                             .spec = spec,
                             .placement = {{.shard = "a", .address = "a:1", .layers = {0}}},
                             .membership = SessionMembers::First(spec),
                             .lease = StepLeases::First(spec, 10)};
  return std::make_shared<CoordinatorSession>(record, 10);
}

TEST(CoordinatorStateTest, IdsAreGreaterThanAnyBeforeWhateverTheClockSays) {
  CoordinatorState state;
  EXPECT_EQ(state.BeginOpening({}, absl::FromUnixNanos(50)), 50u);
  EXPECT_EQ(state.BeginOpening({}, absl::FromUnixNanos(20)), 51u);
  state.last_id = 90;
  EXPECT_EQ(state.BeginOpening({}, absl::FromUnixNanos(60)), 91u);
}

TEST(CoordinatorStateTest, RemembersTheGreatestThatWereAbandoned) {
  CoordinatorState state;
  for (uint64_t id = 1; id <= 1001; ++id) state.Abandon(id);
  EXPECT_FALSE(state.abandoned.contains(1));
  EXPECT_TRUE(state.abandoned.contains(2));
  EXPECT_TRUE(state.abandoned.contains(1001));
}

TEST(CoordinatorStateTest, ASessionIsKnownUntilEveryShardHasRemovedIt) {
  CoordinatorState state;
  const uint64_t id = state.BeginOpening({}, absl::FromUnixNanos(7));
  EXPECT_TRUE(state.Knows(id));
  EXPECT_EQ(state.Find(id), nullptr) << "it is not durable";
  const auto session = MakeSession(id, "run");
  state.Open(session);
  EXPECT_EQ(state.Find(id), session);
  EXPECT_EQ(state.FindByName("run"), session);
  EXPECT_EQ(state.FindByName("other"), nullptr);

  state.BeginEnding(id, 2);
  EXPECT_TRUE(state.Knows(id));
  EXPECT_EQ(state.FindByName("run"), nullptr) << "its name is free";
  EXPECT_THAT(state.counted, IsEmpty());
  EXPECT_TRUE(state.MustRemove(id, 0));
  state.ending.at(id).removed[0] = true;
  EXPECT_FALSE(state.MustRemove(id, 0));
  EXPECT_TRUE(state.MustRemove(id, 1));
  EXPECT_THAT(state.RemovedEverywhere(), IsEmpty());
  state.ending.at(id).removed[1] = true;
  EXPECT_THAT(state.RemovedEverywhere(), ElementsAre(id));
  const std::vector<CoordinatorRecord> records = state.Records();
  ASSERT_EQ(records.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<ClosingRecord>(records[1])) << "after what it ends";

  state.Abandon(id);
  EXPECT_FALSE(state.Knows(id));
  EXPECT_FALSE(state.MustRemove(id, 1));
  EXPECT_THAT(state.Records(), IsEmpty());
}

TEST(CoordinatorStateTest, ItsRecordsRestoreIt) {
  CoordinatorState state;
  for (const uint64_t id : {5u, 7u}) state.Open(MakeSession(id, std::to_string(id)));
  state.BeginEnding(5, 1);
  const auto restored = RestoreState(state.Records(), {{.shard = "a", .address = "", .layers = {}}}, 10);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_TRUE(restored->MustRemove(5, 0));
  ASSERT_NE(restored->Find(7), nullptr);
  EXPECT_TRUE(restored->Knows(7));
  EXPECT_EQ(restored->Find(7)->placement, state.Find(7)->placement);
  EXPECT_EQ(restored->last_id, 7u);
  EXPECT_TRUE(absl::IsFailedPrecondition(RestoreState(state.Records(), {}, 10).status()));
}

SessionMembers MakeMembers(int64_t world_size) {
  SessionSpec spec;
  spec.world_size = world_size;
  return SessionMembers("run", SessionMembers::First(spec));
}

void Join(SessionMembers& members, uint32_t rank, uint64_t incarnation, uint64_t first_step) {
  const auto next = members.PlanJoin(rank, incarnation, first_step);
  ASSERT_TRUE(next.ok() && next->has_value());
  members.Adopt(**next);
}

TEST(SessionMembersTest, RemembersThatAllRanksHadJoined) {
  SessionMembers members = MakeMembers(2);
  Join(members, 0, 5, 3);
  EXPECT_FALSE(members.ever_active());
  Join(members, 1, 6, 3);
  EXPECT_TRUE(members.ever_active());
  const auto left = members.PlanLeave(0, 5);
  ASSERT_TRUE(left.ok() && left->has_value());
  members.Adopt(**left);
  EXPECT_TRUE(SessionMembers("job", members.membership()).ever_active()) << "after a restart of the coordinator";
}

TEST(SessionMembersTest, AfterARollbackNoRankBeginsLater) {
  SessionMembers members = MakeMembers(2);
  Join(members, 0, 5, 2);
  Join(members, 1, 6, 9);
  const Membership back = SessionMembers::RolledBack(members.membership(), 4);
  EXPECT_EQ(back.rollback_epoch, 1u);
  EXPECT_EQ(back.resume_step, 4u);
  EXPECT_THAT(back.first_steps, ElementsAre(2u, 4u));
}

}  // namespace

}  // namespace precondor
