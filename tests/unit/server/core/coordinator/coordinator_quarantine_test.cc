// SPDX-License-Identifier: Apache-2.0
// Sessions that the coordinator's journal does not name.
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

class CoordinatorQuarantineTest : public CoordinatorFixture {
 protected:
  void Restart() {
    clock.Advance(absl::Seconds(1));
    MakeCoordinator();
    const absl::Status restored = coordinator->Restore(journal.records);
    ASSERT_TRUE(restored.ok()) << restored;
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
  Restart();
  for (const auto& shard : shards) EXPECT_TRUE(shard->quarantined.contains(id));
  const uint64_t token = shards[0]->leader;
  journal.records.clear();
  Restart();
  EXPECT_GT(shards[0]->leader, token);
  journal.records.clear();
  clock.SetWall(-absl::Hours(1));
  Restart();
  EXPECT_EQ(coordinator->OpenSession(spec).status().code(), absl::StatusCode::kUnavailable);
  for (const auto& shard : shards) shard->leader = 0;  // as docs/operate/operations.md says: their files are removed
  Restart();
  EXPECT_TRUE(coordinator->OpenSession(spec).ok());
}

}  // namespace
}  // namespace precondor
