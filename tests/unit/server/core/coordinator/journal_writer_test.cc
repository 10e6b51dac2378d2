// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator/journal_writer.h"

#include "gtest/gtest.h"

#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

class JournalWriterTest : public ::testing::Test {
 protected:
  absl::Status Write(uint64_t id) {
    return writer.Write(CloseRecord{.session_id = id}, [this] { ++adopted; });
  }

  FakeJournal journal;
  NullLogger logger;
  Observer observer;
  JournalWriter writer{journal, [] { return std::vector<CoordinatorRecord>{CloseRecord{.session_id = 99}}; }, logger,
                       observer};
  int adopted = 0;
};

TEST_F(JournalWriterTest, AdoptsWhatIsDurableAndNothingElse) {
  EXPECT_TRUE(Write(1).ok());
  EXPECT_EQ(adopted, 1);
  journal.fail = true;
  EXPECT_TRUE(absl::IsUnavailable(Write(2)));
  EXPECT_EQ(adopted, 1);
}

TEST_F(JournalWriterTest, ACompactionKeepsTheTokenAndAllSessions) {
  const auto token = writer.BeginToLead(7, absl::FromUnixNanos(3));
  ASSERT_TRUE(token.ok());
  EXPECT_EQ(*token, 8u) << "greater than the journal's, though the clock is behind";
  journal.compact_above = 1;
  EXPECT_TRUE(Write(1).ok());
  ASSERT_EQ(journal.compactions, 1);
  ASSERT_EQ(journal.records.size(), 2u);
  EXPECT_EQ(std::get<LeaderRecord>(journal.records[0]).token, 8u);
  EXPECT_EQ(std::get<CloseRecord>(journal.records[1]).session_id, 99u);
}

TEST_F(JournalWriterTest, AStorageThatElectsNeedsNoRecordOfTheLeader) {
  journal.elected = 5;
  EXPECT_EQ(*writer.BeginToLead(7, absl::FromUnixNanos(3)), 5u);
  EXPECT_TRUE(journal.records.empty());
}

}  // namespace
}  // namespace precondor
