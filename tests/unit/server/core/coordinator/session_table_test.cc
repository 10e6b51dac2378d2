// SPDX-License-Identifier: Apache-2.0
// Sessions that are open, that end, and the numbers of both.
#include "server/core/coordinator/session_table.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/ending_sessions.h"
#include "server/core/coordinator/session_ids.h"

namespace precondor {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::shared_ptr<CoordinatorSession> MakeSession(uint64_t id, const std::string& name) {
  SessionSpec spec;
  spec.name = name;
  const SessionRecord record{.session_id = id,
                             .spec = spec,
                             .placement = {},
                             .membership = SessionMembers::First(spec),
                             .lease = StepLeases::First(spec, 10)};
  return std::make_shared<CoordinatorSession>(record, 10);
}

TEST(SessionTableTest, AnEntryWithoutASessionGoesWhenItIsFreed) {
  SessionTable table;
  EXPECT_EQ(table.FindEntry("run"), nullptr);
  table.MakeEntry("run").busy = true;
  EXPECT_EQ(table.FindByName("run"), nullptr) << "it is being opened";
  table.FreeEntry("run", nullptr);
  EXPECT_EQ(table.FindEntry("run"), nullptr);
  const auto session = MakeSession(7, "run");
  table.MakeEntry("run").busy = true;
  table.FreeEntry("run", session);
  EXPECT_EQ(table.FindByName("run"), session);
  EXPECT_FALSE(table.FindEntry("run")->busy);
}

TEST(SessionTableTest, FindsSessionsByIdWhileTheyAreOpen) {
  SessionTable table;
  table.Add(MakeSession(7, "run"));
  EXPECT_EQ(table.Find(7)->spec().name, "run");
  EXPECT_EQ(table.Find(8), nullptr);
  table.Remove(7);
  EXPECT_THAT(table.by_id(), IsEmpty());
}

TEST(SessionIdsTest, AreGreaterThanAnyBeforeWhateverTheClockSays) {
  SessionIds ids;
  EXPECT_EQ(ids.Next(absl::FromUnixNanos(50)), 50u);
  EXPECT_EQ(ids.Next(absl::FromUnixNanos(20)), 51u);
  ids.NoteUsed(90);
  EXPECT_EQ(ids.Next(absl::FromUnixNanos(60)), 91u);
}

TEST(SessionIdsTest, RemembersTheGreatestThatWereAbandoned) {
  SessionIds ids;
  for (uint64_t id = 1; id <= 1001; ++id) ids.Abandon(id);
  EXPECT_FALSE(ids.IsAbandoned(1));
  EXPECT_TRUE(ids.IsAbandoned(2));
  EXPECT_TRUE(ids.IsAbandoned(1001));
}

TEST(EndingSessionsTest, ASessionEndsOnceEveryShardHasRemovedIt) {
  EndingSessions ending(2);
  ending.Add(MakeSession(7, "run"));
  EXPECT_NE(ending.FindByName("run"), nullptr);
  ending.NoteRemoved(7, 0, true);
  EXPECT_FALSE(ending.MustRemove(7, 0));
  EXPECT_TRUE(ending.MustRemove(7, 1));
  EXPECT_THAT(ending.RemovedEverywhere(), IsEmpty());
  ending.NoteRemoved(7, 1, true);
  EXPECT_THAT(ending.RemovedEverywhere(), ElementsAre(7u));
  ending.NoteRemoved(7, 0, false);
  EXPECT_THAT(ending.RemovedEverywhere(), IsEmpty()) << "a late call has installed it again";
  std::vector<CoordinatorRecord> records;
  ending.AddRecords(records);
  ASSERT_EQ(records.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<ClosingRecord>(records[1])) << "after what it ends";
  ending.Erase(7);
  EXPECT_FALSE(ending.contains(7));
  EXPECT_FALSE(ending.MustRemove(7, 0));
}

}  // namespace
}  // namespace precondor
