// SPDX-License-Identifier: Apache-2.0
// What a coordinator does with sessions that its journal does not name.
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CoordinatorQuarantineTest : public CoordinatorFixture {
 protected:
  // A session that both shards hold, in epoch 3, of which the journal is lost.
  uint64_t OpenAndLoseTheJournal() {
    const uint64_t id = Open();
    EXPECT_TRUE(coordinator->JoinSession("job", 0, 5, 0).ok());
    EXPECT_TRUE(coordinator->JoinSession("job", 1, 5, 0).ok());
    EXPECT_TRUE(coordinator->JoinSession("job", 1, 6, 9).ok());
    EXPECT_TRUE(coordinator->JoinSession("job", 1, 7, 9).ok());
    journal.records.clear();
    Restart();
    return id;
  }
  void Restart() {
    clock.Advance(absl::Seconds(1));
    MakeCoordinator();
    const absl::Status restored = coordinator->Restore(journal.records);
    ASSERT_TRUE(restored.ok()) << restored;
    coordinator->Reconcile();
  }
  absl::Status Adopt(uint64_t session_id = 0) { return coordinator->AdoptSession("job", session_id).status(); }
};

TEST_F(CoordinatorQuarantineTest, ShowsAndAdoptsWhatShardsHave) {
  const uint64_t id = OpenAndLoseTheJournal();
  for (const auto& shard : shards) {
    EXPECT_TRUE(shard->installed.empty());
    EXPECT_EQ(shard->removals, 0);
  }
  const auto listed = coordinator->ListQuarantined();
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_EQ(listed->front().install.session_id, id);
  EXPECT_EQ(listed->front().install.epoch, 3u);
  EXPECT_THAT(listed->front().install.layers, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(listed->front().last_step, 7u);
  const auto adopted = coordinator->AdoptSession("job", 0);
  ASSERT_TRUE(adopted.ok()) << adopted.status();
  EXPECT_EQ(adopted->session_id, id);
  EXPECT_EQ(adopted->epoch, 4u);
  EXPECT_EQ(adopted->joined, 0u);
  EXPECT_TRUE(coordinator->ListQuarantined()->empty());
  for (const auto& shard : shards) {
    EXPECT_EQ(shard->installed.at(id).epoch, 4u);
    EXPECT_TRUE(shard->installed.at(id).members.empty());
  }
  // Those who held the ranks are known.
  EXPECT_EQ(GetErrorReason(coordinator->JoinSession("job", 1, 6, 9).status()), ErrorReason::kStaleIncarnation);
  const auto joined = coordinator->JoinSession("job", 1, 8, 9);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->epoch, 5u);
  EXPECT_GE(joined->directive.lease_through_step, 9 + options.lease_steps);
  Restart();
  EXPECT_EQ(coordinator->ListSessions().front().session_id, id);
  EXPECT_EQ(coordinator->ListSessions().front().epoch, 5u);
  EXPECT_TRUE(coordinator->ListQuarantined()->empty());
}

TEST_F(CoordinatorQuarantineTest, GivesALayerThatTwoShardsHaveToTheLaterEpoch) {
  const uint64_t id = OpenAndLoseTheJournal();
  std::vector<uint32_t>& moved = shards[1]->quarantined.at(id).install.layers;
  const std::vector<uint32_t> left_behind = shards[0]->quarantined.at(id).install.layers;
  moved = {0, 1, 2, 3};
  shards[1]->quarantined.at(id).install.epoch = 4;
  ASSERT_TRUE(Adopt().ok());
  EXPECT_EQ(shards[1]->installed.at(id).layers.size(), 4u);
  EXPECT_FALSE(shards[0]->installed.contains(id));
  EXPECT_EQ(shards[1]->installed.at(id).epoch, 5u);
}

TEST_F(CoordinatorQuarantineTest, RefusesWhatIsNotWhole) {
  const uint64_t id = OpenAndLoseTheJournal();
  shards[1]->down = true;
  EXPECT_EQ(Adopt().code(), absl::StatusCode::kUnavailable);
  shards[1]->down = false;
  shards[1]->refuse_installs = true;
  EXPECT_EQ(Adopt().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(coordinator->ListSessions().empty());
  coordinator->Reconcile();
  EXPECT_TRUE(shards[0]->quarantined.contains(id)) << "what the first shard has brought back goes there again";
  shards[1]->refuse_installs = false;
  journal.fail = true;
  EXPECT_EQ(Adopt().code(), absl::StatusCode::kUnavailable);
  journal.fail = false;
  coordinator->Reconcile();
  EXPECT_EQ(coordinator->ListQuarantined()->size(), 1u);
  const QuarantinedSession part = shards[1]->quarantined.at(id);
  shards[1]->quarantined.clear();
  EXPECT_THAT(std::string(Adopt().message()), HasSubstr("of its 4 layers in quarantine, expected all"));
  shards[1]->quarantined[id] = part;
  EXPECT_TRUE(Adopt().ok());
}

TEST_F(CoordinatorQuarantineTest, AsksWhichOfSeveralAndLeavesAnOpenOneAlone) {
  const uint64_t first = OpenAndLoseTheJournal();
  const uint64_t second = OpenAndLoseTheJournal();
  EXPECT_THAT(std::string(Adopt().message()), HasSubstr("several are in quarantine"));
  EXPECT_EQ(coordinator->DeleteQuarantined("job", 0).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Adopt(17).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(Adopt(second).ok());
  EXPECT_THAT(std::string(Adopt(first).message()), HasSubstr("close it before"));
  ASSERT_TRUE(coordinator->DeleteQuarantined("job", 0).ok());
  for (const auto& shard : shards) {
    EXPECT_TRUE(shard->quarantined.empty());
    EXPECT_TRUE(shard->installed.contains(second));
  }
  EXPECT_EQ(coordinator->DeleteQuarantined("job", second).code(), absl::StatusCode::kNotFound) << "it is open";
}

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
  OpenAndLoseTheJournal();
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
