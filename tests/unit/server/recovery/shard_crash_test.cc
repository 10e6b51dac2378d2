// SPDX-License-Identifier: Apache-2.0
// A shard whose machine loses its power.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_file_system.h"
#include "tests/unit/server/recovery/stored_shard_fixture.h"

namespace precondor::recovery {
namespace {

// The disk in memory for one thread, given to the several of a store.
class LockedFileSystem final : public store::FileSystem {
  template <typename Function, typename... Arguments>
  auto Locked(Function function, const Arguments&... arguments) {
    MutexLock lock(mu_);
    return std::invoke(function, disk_, arguments...);
  }

 public:
  explicit LockedFileSystem(uint64_t seed) : disk_(seed) {}
  void Crash() {
    MutexLock lock(mu_);
    disk_.Crash();
  }

  absl::StatusOr<std::unique_ptr<store::WritableFile>> Create(const std::string& path) override {
    MutexLock lock(mu_);
    absl::StatusOr<std::unique_ptr<store::WritableFile>> made = disk_.Create(path);
    if (!made.ok()) return made.status();
    return std::make_unique<File>(mu_, *std::move(made));
  }
  absl::StatusOr<std::string> ReadFile(const std::string& path) override {
    return Locked(&FakeFileSystem::ReadFile, path);
  }
  absl::StatusOr<std::string> ReadRange(const std::string& path, uint64_t offset, uint64_t length) override {
    return Locked(&FakeFileSystem::ReadRange, path, offset, length);
  }
  absl::StatusOr<uint64_t> FileSize(const std::string& path) override {
    return Locked(&FakeFileSystem::FileSize, path);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& dir) override {
    return Locked(&FakeFileSystem::List, dir);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Locked(&FakeFileSystem::Rename, from, to);
  }
  absl::Status RemoveFile(const std::string& path) override { return Locked(&FakeFileSystem::RemoveFile, path); }
  absl::Status RemoveDir(const std::string& path) override { return Locked(&FakeFileSystem::RemoveDir, path); }
  absl::Status MakeDir(const std::string& path) override { return Locked(&FakeFileSystem::MakeDir, path); }
  absl::Status SyncDir(const std::string& dir) override { return Locked(&FakeFileSystem::SyncDir, dir); }
  absl::StatusOr<uint64_t> FreeSpace(const std::string& dir) override {
    return Locked(&FakeFileSystem::FreeSpace, dir);
  }
  absl::StatusOr<std::unique_ptr<store::FileLock>> Lock(const std::string& path) override {
    MutexLock lock(mu_);
    absl::StatusOr<std::unique_ptr<store::FileLock>> taken = disk_.Lock(path);
    if (!taken.ok()) return taken.status();
    return std::make_unique<HeldLock>(mu_, *std::move(taken));
  }

 private:
  class File final : public store::WritableFile {
   public:
    File(Mutex& mu, std::unique_ptr<store::WritableFile> file) : mu_(mu), file_(std::move(file)) {}
    ~File() override {
      MutexLock lock(mu_);
      file_.reset();
    }
    absl::Status Append(absl::string_view bytes) override {
      MutexLock lock(mu_);
      return file_->Append(bytes);
    }
    absl::Status Sync() override {
      MutexLock lock(mu_);
      return file_->Sync();
    }
    absl::Status Close() override {
      MutexLock lock(mu_);
      return file_->Close();
    }

   private:
    Mutex& mu_;
    std::unique_ptr<store::WritableFile> file_;
  };
  class HeldLock final : public store::FileLock {
   public:
    HeldLock(Mutex& mu, std::unique_ptr<store::FileLock> lock) : mu_(mu), lock_(std::move(lock)) {}
    ~HeldLock() override {
      MutexLock lock(mu_);
      lock_.reset();
    }

   private:
    Mutex& mu_;
    std::unique_ptr<store::FileLock> lock_;
  };

  Mutex mu_;
  FakeFileSystem disk_;
};

class ShardCrashTest : public StoredShardFixture {
 protected:
  ShardCrashTest() {
    spec.world_size = 2;
    options.snapshot_interval_steps = 0;
    // The background does not do what an acknowledgement has to wait for.
    log_options = {.sync_interval = absl::Hours(1)};
    data = "/data";
  }

  void Open(LockedFileSystem& disk) {
    const absl::Status status = Reopen(disk, real_clock);
    ASSERT_TRUE(status.ok()) << status;
  }
  SessionInstall InstallOf(uint64_t session_id, uint64_t epoch) const {
    SessionInstall install = MakeInstall(epoch);
    install.session_id = session_id;
    install.spec.name += std::to_string(session_id);
    return install;
  }
};

TEST_F(ShardCrashTest, WhatWasInstalledIsThereAfterTheMachineCrashed) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    LockedFileSystem fs(seed);
    Open(fs);
    for (uint64_t session = 1; session <= 4; ++session) {
      ASSERT_TRUE(shard->Install(InstallOf(session, 1)).ok());
    }
    ASSERT_TRUE(shard->Install(InstallOf(2, 3)).ok());
    fs.Crash();
    Open(fs);
    std::map<uint64_t, uint64_t> epochs;
    for (const ShardSessionSummary& session : shard->ListSessions()) epochs[session.session_id] = session.epoch;
    EXPECT_EQ(epochs, (std::map<uint64_t, uint64_t>{{1, 1}, {2, 3}, {3, 1}, {4, 1}})) << "seed " << seed;
    EndProcess();
  }
}

}  // namespace
}  // namespace precondor::recovery
