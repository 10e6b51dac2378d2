// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/session_members.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

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

TEST(SessionMembersTest, APlanChangesNothingUntilItIsAdopted) {
  SessionMembers members = MakeMembers(2);
  const auto next = members.PlanJoin(0, 5, 3);
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_EQ(members.joined(), 0u);
  EXPECT_TRUE(members.fresh());
  members.Adopt(**next);
  EXPECT_EQ(members.joined(), 1u);
  EXPECT_FALSE(members.fresh());
  EXPECT_FALSE(members.active());
  Join(members, 1, 6, 0);
  EXPECT_TRUE(members.active());
  EXPECT_EQ(members.epoch(), 1u) << "the first holders join the epoch that waits for them";
  ASSERT_EQ(members.Members().size(), 2u);
  EXPECT_EQ(members.Members()[0].first_step, 3u);
}

TEST(SessionMembersTest, ALaterHolderBeginsAnEpochAndFencesTheOneBefore) {
  SessionMembers members = MakeMembers(1);
  Join(members, 0, 5, 0);
  EXPECT_EQ(members.PlanJoin(0, 5, 9)->has_value(), false) << "it has the rank already";
  Join(members, 0, 6, 9);
  EXPECT_EQ(members.epoch(), 2u);
  EXPECT_EQ(GetErrorReason(members.PlanJoin(0, 5, 0).status()), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(GetErrorReason(members.CheckMember(0, 5, 2)), ErrorReason::kStaleIncarnation);
  EXPECT_EQ(GetErrorReason(members.CheckMember(0, 7, 2)), ErrorReason::kUnknownRank);
  EXPECT_EQ(GetErrorReason(members.CheckMember(0, 6, 1)), ErrorReason::kStaleEpoch);
  EXPECT_EQ(GetErrorReason(members.CheckMember(1, 6, 2)), ErrorReason::kUnknownRank);
  EXPECT_TRUE(members.CheckMember(0, 6, 2).ok());
  EXPECT_THAT(members.CheckMember(1, 6, 2).message(), HasSubstr("session \"run\" rank 1"));
}

TEST(SessionMembersTest, ARankIsGivenBackOnce) {
  SessionMembers members = MakeMembers(1);
  EXPECT_EQ(GetErrorReason(members.PlanLeave(0, 5).status()), ErrorReason::kUnknownRank);
  Join(members, 0, 5, 0);
  const auto left = members.PlanLeave(0, 5);
  ASSERT_TRUE(left.ok() && left->has_value());
  members.Adopt(**left);
  EXPECT_EQ(members.joined(), 0u);
  EXPECT_FALSE(members.PlanLeave(0, 5)->has_value());
  Join(members, 0, 6, 0);
  EXPECT_EQ(members.epoch(), 2u);
}

TEST(SessionMembersTest, ShardsAreToldOfWhoJoinsAndNotOfWhoLeaves) {
  SessionMembers members = MakeMembers(2);
  Join(members, 0, 5, 0);
  const Membership told = members.membership();
  Join(members, 1, 6, 0);
  members.NoteShardsTold(told);
  EXPECT_FALSE(members.shards_told()) << "it has changed since";
  members.NoteShardsTold(members.membership());
  EXPECT_TRUE(members.shards_told());
  members.Adopt(**members.PlanLeave(1, 6));
  EXPECT_TRUE(members.shards_told());
  Join(members, 1, 7, 0);
  EXPECT_FALSE(members.shards_told());
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
