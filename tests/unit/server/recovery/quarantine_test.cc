// SPDX-License-Identifier: Apache-2.0
// Sessions that no coordinator knows, on a real disk: out of memory, and back as they were.
#include "server/recovery/quarantine.h"

#include <filesystem>
#include <thread>

#include "server/recovery/shard_store.h"
#include "server/store/posix_file_system.h"
#include "tests/support/damage_file.h"
#include "tests/support/wait_until.h"
#include "tests/unit/server/recovery/stored_shard_fixture.h"

namespace precondor::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class QuarantineTest : public StoredShardFixture {
 protected:
  void Reopen() {
    const absl::Status restored = StoredShardFixture::Reopen(fs, clock);
    ASSERT_TRUE(restored.ok()) << restored;
  }
  // On a new disk.
  void Begin() {
    EndProcess();
    std::filesystem::remove_all(data);
    epoch = 1;
    Reopen();
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  }
  std::vector<std::vector<float>> Uninterrupted() {
    Begin();
    return Steps(0, kSteps);
  }
  void Quarantine() {
    const auto existed = shard->Quarantine(kSession);
    ASSERT_TRUE(existed.ok() && *existed) << existed.status();
    EXPECT_EQ(shard->memory()->reserved(), 0);
    EXPECT_TRUE(shard->ListSessions().empty());
    shard->upkeep().CompleteQuarantine();
    ASSERT_EQ(store->ListQuarantined().size(), 1u);
  }
  // Another session, which takes as much memory.
  SessionInstall OtherInstall(uint64_t session_id, const std::string& name) const {
    SessionInstall install = MakeInstall();
    install.session_id = session_id;
    install.spec.name = name;
    return install;
  }
  std::vector<uint64_t> Sessions() const {
    std::vector<uint64_t> ids;
    for (const ShardSessionSummary& session : shard->ListSessions()) ids.push_back(session.session_id);
    return ids;
  }
  std::vector<uint64_t> Quarantined() const {
    std::vector<uint64_t> ids;
    for (const QuarantinedSession& session : store->ListQuarantined()) ids.push_back(session.install.session_id);
    return ids;
  }
  std::string InShard(const std::string& name) const { return data + "/shard/" + name; }
  void FinishFiles() { store->snapshots().WaitIdle(); }
  // As a coordinator does that has its journal again.
  void BringBack() {
    ++epoch;
    const auto installed = shard->Install(MakeInstall(epoch));
    ASSERT_TRUE(installed.ok()) << installed.status();
    EXPECT_TRUE(store->ListQuarantined().empty());
  }

  static constexpr uint64_t kSteps = 24;
  static constexpr uint64_t kOther = kSession + 1;
};

TEST_F(QuarantineTest, GivesFactorsBackBitwiseAfterAnyStep) {
  const std::vector<std::vector<float>> expected = Uninterrupted();
  for (const uint64_t stop : {1, 4, 6}) {
    for (const bool restart : {false, true}) {
      Begin();
      Steps(0, stop);
      Quarantine();
      if (restart) Reopen();
      EXPECT_TRUE(shard->ListSessions().empty()) << "it does not come back by itself";
      ASSERT_EQ(store->ListQuarantined().size(), 1u);
      const QuarantinedSession listed = store->ListQuarantined().front();
      EXPECT_EQ(listed.install.spec.name, "job");
      EXPECT_EQ(listed.install.layers.size(), 2u);
      EXPECT_EQ(listed.last_step, stop - 1);
      BringBack();
      if (restart) Reopen();
      for (uint64_t step = stop; step < kSteps; ++step) {
        EXPECT_EQ(Step(step), expected[step]) << "stopped before " << stop << ", step " << step;
        // Out of the records that lie apart, and out of those and the log.
        if (step == stop || step == stop + 2) Reopen();
      }
    }
  }
}

// Both layers' answers to gradients alone.
class QuarantineOfGradientsTest : public QuarantineTest {
 protected:
  QuarantineOfGradientsTest() { spec.method.name = "soap"; }
  std::vector<float> GradientStep(uint64_t step) {
    std::vector<float> answers;
    for (uint32_t layer : {0, 1}) {
      const std::shared_ptr<Reply> reply = SendFilled(Header(ContributionKind::kGradient, step, 0, layer),
                                                      1.0f + 0.25f * static_cast<float>((step * 7 + layer) % 11));
      EXPECT_TRUE(reply->accepted()) << "step " << step << ": " << reply->ack->status();
      for (float value : reply->values()) answers.push_back(value);
    }
    return answers;
  }
};

TEST_F(QuarantineOfGradientsTest, GivesBackWhatAMethodHasLearned) {
  std::vector<std::vector<float>> expected;
  Begin();
  for (uint64_t step = 0; step < kSteps; ++step) expected.push_back(GradientStep(step));
  for (const bool reopens : {false, true}) {
    Begin();
    for (uint64_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(GradientStep(step), expected[step]) << step;
      if (step % 3 != 1) continue;
      if (reopens && step % 2 == 0) {  // it ends before the records are copied
        ASSERT_TRUE(*shard->Quarantine(kSession));
        Reopen();
        shard->upkeep().CompleteQuarantine();
        ASSERT_EQ(store->ListQuarantined().size(), 1u);
      } else {
        Quarantine();
      }
      if (reopens) Reopen();
      BringBack();
      if (reopens && step % 2 == 1) Reopen();
    }
  }
}

TEST_F(QuarantineTest, TakesASessionASecondTime) {
  const std::vector<std::vector<float>> expected = Uninterrupted();
  Begin();
  for (uint64_t step = 0; step < kSteps; ++step) {
    EXPECT_EQ(Step(step), expected[step]) << step;
    if (step % 3 != 1) continue;
    Quarantine();
    if (step % 2 == 1) Reopen();
    BringBack();
  }
}

TEST_F(QuarantineTest, KeepsItsRecordsNoLongerThanNeeded) {
  Begin();
  Steps(0, 6);
  Quarantine();
  BringBack();
  const std::string kept = InShard("quarantine/7");
  EXPECT_TRUE(std::filesystem::exists(kept));
  // Those that the interval makes are at 8, 12, 16.
  for (uint64_t step = 6; step < kSteps; ++step) {
    Step(step);
    store->snapshots().WaitIdle();
  }
  EXPECT_FALSE(std::filesystem::exists(kept));
}

TEST_F(QuarantineTest, RefusesFramesAndIsDeletedByRemove) {
  Begin();
  Steps(0, 6);
  Quarantine();
  const std::shared_ptr<Reply> refused = Gradient(6, 0, 1);
  EXPECT_EQ(refused->reason(), ErrorReason::kNotActive) << refused->ack->status();
  EXPECT_FALSE(*shard->Quarantine(kSession)) << "again";
  const auto removed = shard->Remove(kSession);
  ASSERT_TRUE(removed.ok() && *removed) << removed.status();
  store->snapshots().WaitIdle();
  Reopen();
  EXPECT_TRUE(store->ListQuarantined().empty());
  EXPECT_TRUE(shard->ListSessions().empty());
  for (const std::string part : {"quarantine", "snapshots"}) {
    EXPECT_TRUE(std::filesystem::is_empty(InShard(part))) << part;
  }
  EXPECT_FALSE(*shard->Remove(kSession));
}

TEST_F(QuarantineTest, EndsAfterItsTimeOfARunningShardWhateverTheWallClockSays) {
  options.quarantine_time = absl::Hours(24 * 30);
  Begin();
  Step(0);
  Quarantine();
  clock.SetWall(absl::Hours(24 * 365 * 50));
  Reopen();
  shard->upkeep().CompleteQuarantine();
  EXPECT_EQ(store->ListQuarantined().size(), 1u);
  for (int day = 0; day < 29; ++day) {
    clock.Advance(absl::Hours(24));
    shard->upkeep().CompleteQuarantine();
    if (day % 10 == 5) Reopen();
    shard->upkeep().CompleteQuarantine();
  }
  EXPECT_EQ(store->ListQuarantined().size(), 1u);
  clock.SetWall(-absl::Hours(24 * 365 * 60));
  clock.Advance(absl::Hours(25));
  shard->upkeep().CompleteQuarantine();
  EXPECT_TRUE(store->ListQuarantined().empty());
  store->snapshots().WaitIdle();
  Reopen();
  EXPECT_TRUE(store->ListQuarantined().empty());
  EXPECT_TRUE(shard->ListSessions().empty());
}

TEST_F(QuarantineTest, StaysForEverWithoutATime) {
  Begin();
  Step(0);
  Quarantine();
  for (int year = 0; year < 100; ++year) {
    clock.Advance(absl::Hours(24 * 365));
    shard->upkeep().CompleteQuarantine();
  }
  EXPECT_EQ(store->ListQuarantined().size(), 1u);
}

TEST_F(QuarantineTest, MakesRoomForASessionOfTheSameName) {
  Begin();
  Step(0);
  ASSERT_TRUE(shard->Install(OtherInstall(kOther, spec.name)).ok());
  EXPECT_THAT(Sessions(), ElementsAre(kOther));
  shard->upkeep().CompleteQuarantine();
  EXPECT_THAT(Quarantined(), ElementsAre(kSession));
  // A crash before it is written down: the log has both.
  Begin();
  Step(0);
  ASSERT_TRUE(shard->Install(OtherInstall(kOther, spec.name)).ok());
  Reopen();
  shard->upkeep().CompleteQuarantine();
  EXPECT_THAT(Sessions(), ElementsAre(kOther));
  EXPECT_THAT(Quarantined(), ElementsAre(kSession));
}

TEST_F(QuarantineTest, StaysWhenItCannotComeBack) {
  options.snapshot_interval_steps = 0;
  Begin();
  Steps(0, 6);
  Quarantine();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(InShard("quarantine"))) {
    if (entry.path().extension() == ".log") DamageFile(entry.path().string());
  }
  EXPECT_THAT(shard->Install(MakeInstall(2)), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_EQ(store->ListQuarantined().size(), 1u);
  EXPECT_EQ(shard->memory()->reserved(), 0);
  EXPECT_TRUE(*shard->Remove(kSession));
}

// The session that came between has a later id and the same name. In the log it comes before the session's return.
TEST_F(QuarantineTest, ComesBackWhateverALaterSessionOfItsNameCameTo) {
  const std::vector<std::vector<float>> expected = Uninterrupted();
  enum class End { kRemoved, kQuarantined, kOnItsWay };
  for (const End end : {End::kRemoved, End::kQuarantined, End::kOnItsWay}) {
    for (const bool restart : {false, true}) {
      Begin();
      Steps(0, 6);
      ASSERT_TRUE(shard->Install(OtherInstall(kOther, spec.name)).ok());
      EXPECT_THAT(Sessions(), ElementsAre(kOther));
      shard->upkeep().CompleteQuarantine();
      EXPECT_THAT(Quarantined(), ElementsAre(kSession));
      if (restart) Reopen();
      ASSERT_TRUE(*(end == End::kRemoved ? shard->Remove(kOther) : shard->Quarantine(kOther)));
      if (end == End::kQuarantined) shard->upkeep().CompleteQuarantine();
      ++epoch;
      ASSERT_TRUE(shard->Install(MakeInstall(epoch)).ok());
      for (uint64_t step = 6; step < kSteps; ++step) {
        if (step % 4 == 2) Reopen();
        ASSERT_THAT(Sessions(), ElementsAre(kSession)) << "end " << static_cast<int>(end) << " step " << step;
        EXPECT_EQ(Step(step), expected[step]) << "end " << static_cast<int>(end) << " step " << step;
      }
      shard->upkeep().CompleteQuarantine();
      if (end == End::kRemoved) {
        EXPECT_THAT(Quarantined(), IsEmpty());
      } else {
        EXPECT_THAT(Quarantined(), ElementsAre(kOther));
      }
    }
  }
}

// The memory that it left may be another's.
TEST_F(QuarantineTest, ARestartNeedsNoRoomForWhatHasGone) {
  enum class End { kOnItsWay, kDeleted, kRemoved, kFilesLeft };
  for (const End end : {End::kOnItsWay, End::kDeleted, End::kRemoved, End::kFilesLeft}) {
    options.capacity_bytes = int64_t{1} << 30;
    Begin();
    options.capacity_bytes = shard->memory()->reserved();
    Reopen();
    Steps(0, 6);
    FinishFiles();
    ASSERT_TRUE(*(end == End::kRemoved ? shard->Remove(kSession) : shard->Quarantine(kSession)));
    ASSERT_TRUE(shard->Install(OtherInstall(kOther, "other")).ok());
    if (end == End::kDeleted || end == End::kFilesLeft) {
      shard->upkeep().CompleteQuarantine();
      if (end == End::kFilesLeft)
        std::filesystem::copy(InShard(""), dir.path() + "/before", std::filesystem::copy_options::recursive);
      ASSERT_TRUE(*shard->Remove(kSession));
    }
    FinishFiles();
    if (end == End::kFilesLeft) {  // a crash after the record
      EndProcess();
      for (const std::string part : {"quarantine", "snapshots"}) {
        std::filesystem::remove_all(InShard(part));
        std::filesystem::copy(dir.path() + "/before/" + part, InShard(part), std::filesystem::copy_options::recursive);
      }
    }
    Reopen();
    EXPECT_THAT(Sessions(), ElementsAre(kOther)) << static_cast<int>(end);
    shard->upkeep().CompleteQuarantine();
    if (end == End::kOnItsWay) {
      EXPECT_THAT(Quarantined(), ElementsAre(kSession));
      ASSERT_TRUE(*shard->Remove(kOther));
      BringBack();
    } else {
      EXPECT_THAT(Quarantined(), IsEmpty());
      FinishFiles();
      EXPECT_TRUE(std::filesystem::is_empty(InShard("quarantine")));
      EXPECT_FALSE(std::filesystem::exists(InShard("snapshots/7")));
    }
  }
}

TEST_F(QuarantineTest, ARemovedSessionCanBeInstalledAgain) {
  Begin();
  Step(0);
  ASSERT_TRUE(shard->Install(OtherInstall(kOther, spec.name)).ok());
  shard->upkeep().CompleteQuarantine();
  ASSERT_TRUE(*shard->Remove(kSession));
  Reopen();
  ASSERT_TRUE(*shard->Remove(kOther));
  const absl::Status installed = shard->Install(MakeInstall()).status();
  ASSERT_TRUE(installed.ok()) << installed;
  Step(0);
  Reopen();
  EXPECT_THAT(Sessions(), ElementsAre(kSession));
  const std::vector<float> next = Step(1);
  EXPECT_EQ(next, Uninterrupted()[1]);
}

TEST_F(QuarantineTest, IsDeletedOnlyOnceTheLogSaysSo) {
  const std::vector<std::vector<float>> expected = Uninterrupted();
  Begin();
  Steps(0, 6);
  Quarantine();
  fs.set_full(true);
  EXPECT_EQ(shard->Remove(kSession).status().code(), absl::StatusCode::kUnavailable);
  FinishFiles();
  fs.set_full(false);
  ASSERT_TRUE(WaitUntil([&] { return store->log().writable(); }));
  EXPECT_THAT(Quarantined(), ElementsAre(kSession));
  BringBack();
  for (uint64_t step = 6; step < kSteps; ++step) {
    EXPECT_EQ(Step(step), expected[step]) << step;
    if (step % 4 == 2) Reopen();
  }
}

// Its name is another session's; what the disk has of it stays for a person to look at.
TEST_F(QuarantineTest, TakesWhatItsLogLacksRecordsOfWhenItsNameIsNeeded) {
  Begin();
  Steps(0, 3);
  fs.set_full(true);
  Step(3);  // something to write, also where the steps before have been synced in the background
  store->log().Sync();
  ASSERT_FALSE(store->log().writable());
  Step(4);
  ASSERT_TRUE(store->log().stale(kSession));
  EXPECT_EQ(shard->Quarantine(kSession).status().code(), absl::StatusCode::kFailedPrecondition) << "it is whole here";
  fs.set_full(false);
  ASSERT_TRUE(WaitUntil([&] { return store->log().writable(); }));
  const absl::Status installed = shard->Install(OtherInstall(kOther, spec.name)).status();
  ASSERT_TRUE(installed.ok()) << installed;
  shard->upkeep().CompleteQuarantine();
  EXPECT_THAT(Quarantined(), ElementsAre(kSession));
  Reopen();
  EXPECT_THAT(Sessions(), ElementsAre(kOther));
  EXPECT_TRUE(*shard->Remove(kSession));
  EXPECT_THAT(Quarantined(), IsEmpty());
}

TEST_F(QuarantineTest, OneOnItsWayIsNeitherInstalledNorRemoved) {
  const std::vector<std::vector<float>> expected = Uninterrupted();
  Begin();
  Steps(0, 6);
  ASSERT_TRUE(*shard->Quarantine(kSession));
  EXPECT_THAT(Quarantined(), IsEmpty()) << "it is written down by CompleteQuarantine alone";
  EXPECT_EQ(GetErrorReason(shard->Install(MakeInstall(2)).status()), ErrorReason::kNotActive);
  EXPECT_EQ(GetErrorReason(shard->Remove(kSession).status()), ErrorReason::kNotActive);
  EXPECT_FALSE(*shard->Quarantine(kSession));
  shard->upkeep().CompleteQuarantine();
  BringBack();
  EXPECT_EQ(Step(6), expected[6]);
}

TEST_F(QuarantineTest, ItsDirectoryIsAnotherProcesssUntilThatEnds) {
  Begin();
  Step(0);
  const std::string unfinished = InShard("quarantine/99");
  std::filesystem::create_directory(unfinished);
  ShardStore second(fs, data, log_options, clock, logger, observer);
  Shard other(options, *backend, executor, clock, logger, observer);
  other.replay().Begin();
  EXPECT_EQ(second.Restore(other).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(std::filesystem::exists(unfinished));
  Reopen();
  EXPECT_FALSE(std::filesystem::exists(unfinished));
}

TEST_F(QuarantineTest, AnAgeThatIsWrittenUndoesNothing) {
  recovery::Quarantine quarantine(fs, dir.path() + "/apart", clock);
  ASSERT_TRUE(quarantine.Open().ok());
  const auto no_records = [](const store::LogReplay&) -> absl::StatusOr<uint64_t> { return 1; };
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(quarantine.Put({.install = MakeInstall(), .last_step = 0}, 1, no_records, no_records).ok());
    quarantine.Age(absl::InfiniteDuration());
    clock.Advance(absl::Hours(2));
    const bool removed = i % 2 == 0;
    std::thread ages([&] { quarantine.Age(absl::InfiniteDuration()); });
    const absl::Status gone = removed ? quarantine.Remove(kSession) : quarantine.Return(kSession, 5);
    ages.join();
    ASSERT_TRUE(gone.ok()) << gone;
    recovery::Quarantine again(fs, dir.path() + "/apart", clock);
    ASSERT_TRUE(again.Open().ok());
    for (const recovery::Quarantine* one : {&quarantine, &again}) {
      ASSERT_FALSE(one->Holds(kSession)) << "round " << i;
      ASSERT_EQ(one->Knows(kSession), !removed) << "round " << i;
    }
  }
}

TEST_F(QuarantineTest, WithoutADataDirectoryThereIsNothingToKeep) {
  options.journal = nullptr;
  Start();
  EXPECT_TRUE(*shard->Quarantine(kSession));
  EXPECT_FALSE(*shard->Quarantine(kSession));
  EXPECT_EQ(shard->memory()->reserved(), 0);
}

}  // namespace
}  // namespace precondor::recovery
