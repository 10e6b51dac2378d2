// SPDX-License-Identifier: Apache-2.0
// Shards with data directories side by side: one is lost, another is given its layers and reads its directory.
#include "server/recovery/peer_stores.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>

#include "server/core/thread_pool.h"
#include "server/recovery/shard_store.h"
#include "server/store/posix_file_system.h"
#include "tests/support/damage_file.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"
#include "tests/unit/server/core/shard_fixture.h"

namespace precondor::recovery {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct TakeoverObserver final : Observer {
  void OnLayersTakenOver(absl::string_view, TakeoverOutcome outcome, int64_t layers) override {
    by_outcome[static_cast<size_t>(outcome)] += layers;
    total += layers;
  }
  int64_t of(TakeoverOutcome outcome) const { return by_outcome[static_cast<size_t>(outcome)]; }
  std::array<std::atomic<int64_t>, 4> by_outcome = {};
  std::atomic<int64_t> total = 0;
};

class PeerStoresTest : public ShardFixture {
 protected:
  PeerStoresTest() {
    spec.world_size = 1;
    spec.on_shard_loss = ShardLossPolicy::kDegrade;
    spec.method.name = "mkor";
    options.make_method = MakeMethod;
    options.snapshot_interval_steps = 4;
    log_options.sync_interval = log_options.reopen_interval = absl::Milliseconds(1);
    log_options.log.segment_bytes = 2000;
  }
  ~PeerStoresTest() override { Close(); }

  std::string DirOf(const std::string& name) const { return dir.path() + "/" + name; }
  void Close() {
    shard.reset();
    store.reset();
    peers.reset();
  }
  // A shard with this data directory begins, or comes back. `pattern`: of the others' directories; empty: it knows
  // none.
  void Open(const std::string& name, const std::string& pattern = "") {
    Close();
    MakePeers(name, pattern);
    store = std::make_unique<ShardStore>(fs, DirOf(name), log_options, real_clock, logger, seen);
    options.journal = store.get();
    options.peers = peers.get();
    shard = std::make_unique<Shard>(options, *backend, executor, clock, logger, seen);
    shard->AwaitReplay();
    const absl::Status status = store->Restore(*shard);
    ASSERT_TRUE(status.ok()) << status;
    shard->Probe({.from = clock.Monotonic(), .duration = absl::Hours(1)}).IgnoreError();
  }
  void MakePeers(const std::string& name, const std::string& pattern) {
    if (pattern.empty()) return;
    peers = std::make_unique<PeerStores>(
        fs,
        PeerStoresOptions{
            .patterns = {dir.path() + "/" + pattern}, .own_data_dir = DirOf(name), .background = background},
        logger);
  }
  void Install(uint64_t at_epoch) {
    epoch = at_epoch;
    const absl::Status status = shard->Install(MakeInstall(epoch)).status();
    ASSERT_TRUE(status.ok()) << status;
  }
  // Of both layers: the version of their answers, and what they are.
  std::pair<uint64_t, std::vector<float>> Step(uint64_t step, float scale = 0.25f) {
    std::pair<uint64_t, std::vector<float>> answers;
    for (uint32_t layer : {0, 1}) {
      for (ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
        const ContributionHeader header = Header(kind, step, 0, layer);
        Payload payload = Filled(header, 1.0f + scale * static_cast<float>((step * 7 + layer) % 11));
        const std::shared_ptr<Reply> reply = Send(header, std::move(payload));
        EXPECT_TRUE(reply->accepted()) << reply->ack->status();
        if (kind == ContributionKind::kStatistics) continue;
        if (pool != nullptr) pool->Drain();
        if (!reply->result.has_value() || !reply->result->ok()) continue;
        answers.first = (*reply->result)->factor_version;
        for (float value : reply->values()) answers.second.push_back(value);
      }
    }
    return answers;
  }
  void Steps(uint64_t first, uint64_t end, float scale = 0.25f) {
    for (uint64_t step = first; step < end; ++step) Step(step, scale);
    store->log().Sync();
    store->snapshots().WaitIdle();
  }
  void TakeOver(int64_t layers = 2) {
    ASSERT_TRUE(WaitUntil([&] {
      while (peers->Work()) {
      }
      return seen.total >= layers;
    }));
    // Whatever was posted since.
    while (peers->Work()) {
    }
  }
  std::map<std::string, std::string> FilesOf(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(DirOf(name))) {
      if (!entry.is_regular_file()) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      files[entry.path().string()] = std::string(std::istreambuf_iterator<char>(file), {});
    }
    return files;
  }
  std::vector<std::string> Paths(const std::string& name, const std::string& part) const {
    std::vector<std::string> found;
    for (const auto& [path, bytes] : FilesOf(name)) {
      if (path.find(part) != std::string::npos) found.push_back(path);
    }
    return found;
  }

  TempDir dir;
  store::PosixFileSystem fs;
  RealClock real_clock;
  ShardLogOptions log_options;
  TakeoverObserver seen;
  bool background = false;
  std::unique_ptr<ThreadPoolExecutor> pool;  // of a test with threads
  std::unique_ptr<ShardStore> store;
  std::unique_ptr<PeerStores> peers;
};

TEST_F(PeerStoresTest, GoesOnBitForBitAndComesBackWithoutTheOthersDirectory) {
  Open("undisturbed");
  Install(1);
  Steps(0, 13);
  const auto expected = Step(13);
  Open("lost");
  Install(1);
  Steps(0, 11);
  Open("heir", "*");
  std::filesystem::remove_all(DirOf("undisturbed"));
  const std::map<std::string, std::string> before = FilesOf("lost");
  Install(2);
  EXPECT_EQ(Step(11).first, 0u);
  TakeOver();
  EXPECT_EQ(seen.of(TakeoverOutcome::kAdopted), 2);
  EXPECT_EQ(FilesOf("lost"), before) << "nothing there is changed";
  EXPECT_EQ(Step(12).first, 13u);
  std::filesystem::remove_all(DirOf("lost"));
  Open("heir");
  EXPECT_EQ(Step(13), expected);
}

TEST_F(PeerStoresTest, TheOwnerMayBeAliveAndGoOnWriting) {
  Open("owner");
  Install(1);
  Steps(0, 6);
  std::unique_ptr<Shard> owner = std::move(shard);
  std::unique_ptr<ShardStore> owners_store = std::move(store);
  Open("heir", "owner");
  Install(2);
  TakeOver();
  EXPECT_EQ(seen.of(TakeoverOutcome::kAdopted), 2);
  EXPECT_EQ(Step(6).first, 7u);
  // It has kept its lock, its log and its snapshots.
  shard.swap(owner);
  epoch = 1;
  EXPECT_EQ(Step(6).first, 7u);
  shard.swap(owner);
  epoch = 2;
  owner.reset();
}

TEST_F(PeerStoresTest, ADamagedSnapshotLeavesTheOneBefore) {
  Open("lost");
  Install(1);
  Steps(0, 6);
  Steps(6, 10);
  Close();
  const std::vector<std::string> images = Paths("lost", "layer-000000.snap");
  ASSERT_EQ(images.size(), 2u);
  DamageFile(images.back());
  Open("heir", "lost");
  Install(2);
  TakeOver();
  EXPECT_EQ(seen.of(TakeoverOutcome::kAdopted), 2);
  EXPECT_EQ(Step(10).first, 11u);
}

TEST_F(PeerStoresTest, ADamagedLogCostsTheFactorsAndNothingElse) {
  Open("lost");
  Install(1);
  Steps(0, 10);
  Close();
  const std::vector<std::string> segments = Paths("lost", ".log");
  ASSERT_GE(segments.size(), 2u);
  DamageFile(segments.front());
  Open("heir", "lost");
  Install(2);
  EXPECT_EQ(Step(10).first, 0u);
  TakeOver();
  EXPECT_EQ(seen.of(TakeoverOutcome::kDamaged), 2);
  EXPECT_EQ(Step(11).first, 2u);
}

TEST_F(PeerStoresTest, TheLastOwnerIsTaken) {
  // Names and numbers of updates speak for the others.
  Open("a-first");
  Install(1);
  Steps(0, 9, 0.5f);
  Open("b-second");
  Install(3);
  Steps(9, 14);
  Open("c-between");
  Install(2);
  Steps(9, 18, 0.5f);
  Open("heir", "*");
  Install(4);
  TakeOver();
  EXPECT_EQ(Step(18).first, 6u);
}

TEST_F(PeerStoresTest, ASessionThatWasRemovedThereIsNotFound) {
  Open("lost");
  Install(1);
  Steps(0, 3);
  store->snapshots().WaitIdle();
  ASSERT_TRUE(*shard->Remove(kSession));
  Open("heir", "lost");
  Install(2);
  TakeOver();
  EXPECT_EQ(seen.of(TakeoverOutcome::kNone), 2);
}

TEST_F(PeerStoresTest, ItsOwnDirectoryIsLeftOutHoweverItIsCalled) {
  Open("heir");
  Install(1);
  Steps(0, 3);
  Close();
  std::filesystem::create_directory_symlink(DirOf("heir"), DirOf("link"));
  MakePeers("heir", "*");
  EXPECT_THAT(peers->Find(kSession, {0, 1}), IsEmpty());
  peers.reset();
  MakePeers("other", "*");
  EXPECT_EQ(peers->Find(kSession, {0, 1}).size(), 1u);
  EXPECT_THAT(peers->Find(kSession, {2}), IsEmpty());
  EXPECT_THAT(peers->Find(kSession + 1, {0, 1}), IsEmpty());
}

TEST_F(PeerStoresTest, WhatWasTakenOverGoesWithTheSession) {
  Open("lost");
  Install(1);
  Steps(0, 3);
  Open("heir", "lost");
  Install(2);
  TakeOver();
  EXPECT_EQ(Paths("heir", "/factors/").empty(), false);
  ASSERT_TRUE(*shard->Remove(kSession));
  store->snapshots().WaitIdle();
  EXPECT_THAT(Paths("heir", "/factors/"), IsEmpty());
}

TEST_F(PeerStoresTest, RunsOnAThreadOfItsOwnWhileStepsGoOn) {
  Open("lost");
  Install(1);
  Steps(0, 9);
  Close();
  background = true;
  pool = std::make_unique<ThreadPoolExecutor>(2);
  MakePeers("heir", "lost");
  store = std::make_unique<ShardStore>(fs, DirOf("heir"), log_options, real_clock, logger, seen);
  options.journal = store.get();
  options.peers = peers.get();
  shard = std::make_unique<Shard>(options, *backend, *pool, clock, logger, seen);
  ASSERT_TRUE(store->Restore(*shard).ok());
  shard->Probe({.from = clock.Monotonic(), .duration = absl::Hours(1)}).IgnoreError();
  Install(2);
  uint64_t step = 9;
  EXPECT_TRUE(WaitUntil([&] {
    Step(step++);
    return seen.of(TakeoverOutcome::kAdopted) == 2 && StatsOf(0).factor_version > 9 && StatsOf(1).factor_version > 9;
  }));
  peers->Stop();
  store->snapshots().WaitIdle();
  pool->Drain();
}

TEST_F(PeerStoresTest, PatternsNameDirectoriesOrWhatTheyLieIn) {
  for (const char* path : {"all/shard-0/shard", "all/shard-1/shard", "all/other/coordinator", "b/data/shard"}) {
    std::filesystem::create_directories(DirOf(path));
  }
  const auto expand = [&](const std::string& pattern) {
    std::vector<std::string> found = ExpandDataDirs(fs, dir.path() + "/" + pattern);
    for (std::string& path : found) path = std::filesystem::relative(path, dir.path()).string();
    return found;
  };
  EXPECT_THAT(expand("all"), ElementsAre("all/shard-0", "all/shard-1"));
  EXPECT_THAT(expand("all/shard-1"), ElementsAre("all/shard-1"));
  EXPECT_THAT(expand("all/shard-[1-9]"), ElementsAre("all/shard-1"));
  EXPECT_THAT(expand("*/*"), ElementsAre("all/shard-0", "all/shard-1", "b/data"));
  EXPECT_THAT(expand("*"), ElementsAre("all/shard-0", "all/shard-1", "b/data"));
  EXPECT_THAT(expand("all/other"), IsEmpty());
  EXPECT_THAT(expand("none/*"), IsEmpty());
}

}  // namespace
}  // namespace precondor::recovery
