// SPDX-License-Identifier: Apache-2.0
// A session that is put in quarantine, brought back and deleted, as others ask for it meanwhile.
#include <functional>
#include <map>

#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

// Remembers installs alone. `during` runs in the middle of each call that changes the installs, and of Append.
class QuarantineJournal final : public ShardJournal {
 public:
  void Append(const ShardRecord& record) override {
    if (const auto* install = std::get_if<InstallRecord>(&record))
      known[install->install.session_id] = install->install;
    if (std::holds_alternative<QuarantineRecord>(record)) Run(on_record);
  }
  void Keep(LayerImage) override {}
  absl::Status CheckQuarantine(uint64_t) override { return absl::OkStatus(); }
  absl::Status Quarantine(uint64_t session_id, uint64_t last_step) override {
    if (!known.contains(session_id)) return absl::NotFoundError("");
    there[session_id] = {.install = known.at(session_id), .last_step = last_step};
    return absl::OkStatus();
  }
  std::vector<QuarantinedSession> ListQuarantined() const override {
    std::vector<QuarantinedSession> listed;
    for (const auto& [id, session] : there) listed.push_back(session);
    return listed;
  }
  absl::Status Return(uint64_t session_id, ShardReplay& replay) override {
    replay.Add(InstallRecord{there.at(session_id).install});
    Run(during);
    there.erase(session_id);
    return replay.CheckReturned(session_id);
  }
  absl::StatusOr<bool> DeleteQuarantined(uint64_t session_id) override {
    Run(during);
    return there.erase(session_id) > 0;
  }
  static void Run(std::function<void()>& once) {
    if (const std::function<void()> run = std::exchange(once, nullptr); run != nullptr) run();
  }

  std::map<uint64_t, SessionInstall> known;
  std::map<uint64_t, QuarantinedSession> there;
  std::function<void()> during, on_record;
};

class ShardQuarantineTest : public ShardFixture {
 protected:
  ShardQuarantineTest() { options.journal = &journal; }
  ~ShardQuarantineTest() override { shard.reset(); }

  void StartInQuarantine() {
    Start();
    ASSERT_TRUE(*shard->Quarantine(kSession));
    shard->upkeep().CompleteQuarantine();
    ASSERT_EQ(journal.there.size(), 1u);
  }
  void ExpectBusy(const absl::Status& status) { EXPECT_EQ(GetErrorReason(status), ErrorReason::kNotActive) << status; }

  QuarantineJournal journal;
};

TEST_F(ShardQuarantineTest, NothingEndsASessionThatComesBack) {
  StartInQuarantine();
  bool asked = false;
  journal.during = [&] {
    asked = true;
    ExpectBusy(shard->Remove(kSession).status());
    ExpectBusy(shard->Quarantine(kSession).status());
    ExpectBusy(shard->Install(MakeInstall(2)).status());
    EXPECT_TRUE(shard->ListSessions().empty());
  };
  const absl::Status back = shard->Install(MakeInstall(2)).status();
  EXPECT_TRUE(back.ok()) << back;
  EXPECT_TRUE(asked);
  EXPECT_EQ(shard->ListSessions().size(), 1u);
  EXPECT_TRUE(*shard->Remove(kSession));
}

TEST_F(ShardQuarantineTest, NothingBringsBackASessionThatIsDeleted) {
  StartInQuarantine();
  bool asked = false;
  journal.during = [&] {
    asked = true;
    ExpectBusy(shard->Install(MakeInstall(2)).status());
    ExpectBusy(shard->Remove(kSession).status());
  };
  EXPECT_TRUE(*shard->Remove(kSession));
  EXPECT_TRUE(asked);
  EXPECT_TRUE(shard->ListSessions().empty());
  EXPECT_TRUE(shard->Install(MakeInstall(2)).ok()) << "anew";
}

// Two Installs, and between them the session goes to quarantine.
TEST_F(ShardQuarantineTest, AnInstallUnderWayDoesNotBeginItAnew) {
  std::function<void()> once = [&] {
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
    ASSERT_TRUE(*shard->Quarantine(kSession));
  };
  options.make_method = [&, make = options.make_method](const MethodConfig& config) {
    QuarantineJournal::Run(once);
    return make(config);
  };
  MakeShard();
  ExpectBusy(shard->Install(MakeInstall()).status());
  EXPECT_TRUE(shard->ListSessions().empty());
  EXPECT_EQ(shard->memory()->reserved(), 0);
  shard->upkeep().CompleteQuarantine();
  EXPECT_EQ(journal.there.size(), 1u);
}

TEST_F(ShardQuarantineTest, WhatTheJournalDoesNotKnowIsForgotten) {
  Start();
  journal.known.clear();
  ASSERT_TRUE(*shard->Quarantine(kSession));
  shard->upkeep().CompleteQuarantine();
  EXPECT_TRUE(shard->Install(MakeInstall(2)).ok());
}

TEST_F(ShardQuarantineTest, SaysSoBeforeItsMemoryIsFree) {
  Start();
  int64_t reserved = 0;
  journal.on_record = [&] { reserved = shard->memory()->reserved(); };
  ASSERT_TRUE(*shard->Quarantine(kSession));
  EXPECT_GT(reserved, 0);
  EXPECT_EQ(shard->memory()->reserved(), 0);
}

}  // namespace
}  // namespace precondor
