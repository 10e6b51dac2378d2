// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/shard_log.h"

#include <filesystem>

#include "gtest/gtest.h"

#include "tests/support/failing_file_system.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"
#include "tests/unit/server/recovery/recovery_testing.h"

namespace precondor::recovery {
namespace {

class StaleObserver final : public Observer {
 public:
  void OnLogStale(absl::string_view, bool stale) override { stale ? ++became_stale : ++healed; }
  std::atomic<int> became_stale = 0, healed = 0;
};

// Images of both layers before any work on `step`.
std::map<uint32_t, LayerStep> Cuts(uint64_t step) {
  return {{0, {.layer = 0, .step = step, .rollback_epoch = 2}}, {1, {.layer = 1, .step = step, .rollback_epoch = 2}}};
}

class ShardLogTest : public ::testing::Test {
 protected:
  ShardLogTest() {
    options.sync_interval = absl::Milliseconds(1);
    options.reopen_interval = absl::Milliseconds(1);
  }
  ~ShardLogTest() override { log.reset(); }

  // Returns the records of the log without the session's installs.
  std::vector<uint64_t> Open() {
    log.reset();
    log = std::make_unique<ShardLog>(fs, dir.path() + "/log", options, clock, logger, observer);
    std::vector<uint64_t> updates;
    const absl::Status status = log->Open([&updates](const ShardRecord& record) {
      if (const auto* update = std::get_if<UpdateRecord>(&record)) updates.push_back(update->at.updates);
    });
    EXPECT_TRUE(status.ok()) << status;
    return updates;
  }
  // Until the log takes records again.
  void AwaitWritable() {
    ASSERT_TRUE(WaitUntil([&] { return log->writable(); }));
  }

  TempDir dir;
  FailingFileSystem fs;
  ShardLogOptions options;
  RealClock clock;
  NullLogger logger;
  StaleObserver observer;
  std::unique_ptr<ShardLog> log;
};

TEST_F(ShardLogTest, GivesBackWhatWasAppended) {
  EXPECT_TRUE(Open().empty());
  log->Append(MakeInstall(7));
  for (uint64_t i = 1; i <= 3; ++i) log->Append(MakeUpdate(7, 0, i));
  log->Sync();
  EXPECT_EQ(Open(), (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(log->InstallOf(7)->install.spec.name, "job7");
  EXPECT_FALSE(log->InstallOf(8).has_value());
}

TEST_F(ShardLogTest, AnInstallThatSaysNothingNewIsLeftOut) {
  Open();
  log->Append(MakeInstall(7));
  const uint64_t next = log->next_sequence();
  log->Append(MakeInstall(7));
  EXPECT_EQ(log->next_sequence(), next);
  log->Append(MakeInstall(7, 2));
  EXPECT_EQ(log->next_sequence(), next + 1);
  EXPECT_EQ(log->InstallOf(7)->install.epoch, 2u);
}

TEST_F(ShardLogTest, SegmentsGoWhenASnapshotHoldsWhatTheySay) {
  options.log.segment_bytes = 200;
  Open();
  log->Append(MakeInstall(7));
  log->Append(MakeInstall(8));
  for (uint64_t i = 1; i <= 9; ++i) log->Append(MakeUpdate(7, 0, i, 100));
  const uint64_t sequence = log->next_sequence();
  log->OnSnapshot(7, sequence, sequence, Cuts(91));
  // The other session still needs its install.
  EXPECT_EQ(Open().size(), 9u);
  log->OnSnapshot(7, sequence, sequence, Cuts(91));
  log->Append(RemoveRecord{8});
  for (uint64_t i = 10; i <= 12; ++i) log->Append(MakeUpdate(7, 0, i, 100));
  log->OnSnapshot(7, sequence, sequence, Cuts(91));
  const std::vector<uint64_t> left = Open();
  EXPECT_LT(left.size(), 12u);
  EXPECT_EQ(left.back(), 12u);
  EXPECT_LE(left.front(), 10u);
}

TEST_F(ShardLogTest, AFullDiskMakesASessionStaleUntilItsSnapshot) {
  Open();
  log->Append(MakeInstall(7));
  log->Append(MakeInstall(8));
  log->Append(MakeUpdate(7, 0, 1));
  log->Sync();  // otherwise the syncer, and not the next append, may find the full disk first
  log->Append(MakeUpdate(7, 0, 2));
  fs.set_full(true);
  log->Append(MakeUpdate(7, 0, 3));
  EXPECT_TRUE(log->stale(7));
  EXPECT_EQ(observer.became_stale, 1);
  fs.set_full(false);
  AwaitWritable();
  log->Append(MakeUpdate(7, 0, 4));
  EXPECT_TRUE(log->stale(7));
  EXPECT_FALSE(log->stale(8));
  // One that began before the gap does not close it.
  log->OnSnapshot(7, 1, 1, Cuts(30));
  EXPECT_TRUE(log->stale(7));
  log->OnSnapshot(7, log->next_sequence(), log->next_sequence(), Cuts(31));
  EXPECT_FALSE(log->stale(7));
  EXPECT_EQ(observer.healed, 1);
  EXPECT_EQ(Open(), (std::vector<uint64_t>{1, 2, 4}));
}

TEST_F(ShardLogTest, ASnapshotFromBeforeALostDecisionHealsNothing) {
  Open();
  log->Append(MakeInstall(7));
  fs.set_full(true);
  log->Append(MakeUpdate(7, 0, 1));  // something to write, also where the install has been synced in the background
  log->Sync();
  // A plan changes the layer without an update.
  log->Append(PlanRecord{.at = {.session_id = 7, .layer = 0, .step = 50, .rollback_epoch = 2}, .plan = {}});
  fs.set_full(false);
  AwaitWritable();
  log->OnSnapshot(7, log->next_sequence(), log->next_sequence(), Cuts(50));
  EXPECT_TRUE(log->stale(7));
  log->OnSnapshot(7, log->next_sequence(), log->next_sequence(), Cuts(51));
  EXPECT_FALSE(log->stale(7));
}

TEST_F(ShardLogTest, ADiskThatLosesWhatItHadAcceptedMakesAllSessionsStale) {
  Open();
  log->Append(MakeInstall(7));
  log->Append(MakeInstall(8));
  log->Append(MakeUpdate(8, 0, 1));
  log->Sync();
  for (const auto& file : std::filesystem::directory_iterator(dir.path() + "/log")) {
    if (file.path().extension() == ".log") std::filesystem::resize_file(file.path(), file.file_size() - 64);
  }
  EXPECT_FALSE(log->stale(8));
  fs.set_full(true);
  log->Append(MakeUpdate(7, 0, 1));
  log->Sync();
  fs.set_full(false);
  AwaitWritable();
  EXPECT_TRUE(log->stale(8));
}

TEST_F(ShardLogTest, ASnapshotFromBeforeALossOfFilesHealsNothing) {
  Open();
  log->Append(MakeInstall(7));
  log->Append(MakeUpdate(7, 0, 1));
  const uint64_t begun_at = log->next_sequence();
  log->Append(MakeUpdate(7, 0, 2));
  std::filesystem::remove_all(dir.path() + "/log");
  log->Sync();
  EXPECT_TRUE(log->stale(7));
  AwaitWritable();
  log->OnSnapshot(7, begun_at, begun_at, Cuts(20));
  EXPECT_TRUE(log->stale(7));
  log->OnSnapshot(7, log->next_sequence(), log->next_sequence(), Cuts(20));
  EXPECT_FALSE(log->stale(7));
}

TEST_F(ShardLogTest, DamageIsAnError) {
  Open();
  log->Append(MakeInstall(7));
  log->Sync();
  log.reset();
  store::PosixFileSystem disk;
  ASSERT_TRUE(disk.MakeDir(dir.path() + "/log").ok());
  const std::vector<std::string> names = disk.List(dir.path() + "/log").value();
  ASSERT_TRUE(disk.RemoveFile(dir.path() + "/log/" + names[0]).ok());
  auto file = disk.Create(dir.path() + "/log/" + names[0]).value();
  ASSERT_TRUE(file->Append("not a segment").ok());
  ShardLog damaged(fs, dir.path() + "/log", options, clock, logger, observer);
  EXPECT_TRUE(absl::IsDataLoss(damaged.Open([](const ShardRecord&) {})));
}

}  // namespace
}  // namespace precondor::recovery
