// SPDX-License-Identifier: Apache-2.0
// That the fake disk is as bad as it says: tests that pass on it mean something only then.
#include "tests/support/fake_file_system.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using Operation = FakeFileSystem::Operation;

std::unique_ptr<store::WritableFile> Make(FakeFileSystem& fs, const std::string& path) {
  auto file = fs.Create(path);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *std::move(file) : nullptr;
}

TEST(FakeFileSystemTest, ACrashKeepsWhatWasSyncedAndTearsTheRest) {
  const std::string synced(3000, 's'), unsynced(3 * FakeFileSystem::kPageBytes, 'u');
  std::set<size_t> sizes;
  int zeroed = 0, garbled = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    FakeFileSystem fs(seed);
    const auto file = Make(fs, "a");
    ASSERT_TRUE(file->Append(synced).ok());
    ASSERT_TRUE(file->Sync().ok());
    ASSERT_TRUE(fs.SyncDir(".").ok());
    ASSERT_TRUE(file->Append(unsynced).ok());
    fs.Crash();
    const std::string bytes = *fs.ReadFile("a");
    ASSERT_EQ(bytes.substr(0, synced.size()), synced) << "seed " << seed;
    const std::string rest = bytes.substr(synced.size());
    sizes.insert(rest.size());
    zeroed += absl::StrContains(rest, std::string(100, '\0'));
    garbled += rest.find_first_not_of(std::string("u\0", 2)) != std::string::npos;
    EXPECT_FALSE(file->Append("x").ok());  // of a process that is gone
  }
  EXPECT_GT(sizes.size(), 100u);
  EXPECT_GT(zeroed, 20);
  EXPECT_GT(garbled, 50);
}

TEST(FakeFileSystemTest, NamesLastOnlyOnceTheirDirectoryIsSynced) {
  std::set<std::string> outcomes;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    FakeFileSystem fs(seed);
    for (const char* name : {"old", "gone", "tmp"}) {
      const auto file = Make(fs, name);
      ASSERT_TRUE(file->Append(name).ok() && file->Sync().ok());
    }
    ASSERT_TRUE(fs.SyncDir(".").ok());
    ASSERT_TRUE(fs.Rename("tmp", "old").ok());
    ASSERT_TRUE(fs.RemoveFile("gone").ok());
    Make(fs, "new");
    fs.Crash();
    std::string outcome;
    for (const std::string& name : fs.files()) outcome += name + "=" + *fs.ReadFile(name) + " ";
    // The rename is atomic.
    EXPECT_TRUE(absl::StrContains(outcome, "old=old tmp=tmp") ||
                (absl::StrContains(outcome, "old=tmp") && !absl::StrContains(outcome, "tmp=tmp")))
        << outcome;
    outcomes.insert(outcome);
  }
  EXPECT_EQ(outcomes.size(), 8u);  // every subset of the three changes
}

TEST(FakeFileSystemTest, SyncedNamesAndBytesSurviveEveryCrash) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    FakeFileSystem fs(seed);
    ASSERT_TRUE(fs.MakeDir("d").ok());
    ASSERT_TRUE(fs.SyncDir(".").ok());
    const auto file = Make(fs, "d/a");
    ASSERT_TRUE(file->Append("bytes").ok() && file->Sync().ok());
    ASSERT_TRUE(fs.SyncDir("d").ok());
    fs.Crash();
    fs.Crash();
    EXPECT_EQ(*fs.ReadFile("d/a"), "bytes");
  }
}

TEST(FakeFileSystemTest, AFailedSyncLosesItsBytesThoughTheNextSucceeds) {
  FakeFileSystem fs(3);
  const auto file = Make(fs, "a");
  ASSERT_TRUE(fs.SyncDir(".").ok());
  ASSERT_TRUE(file->Append("first").ok());
  fs.set_hook([](Operation operation, const std::string&, uint64_t) {
    return operation == Operation::kSync ? absl::UnavailableError("EIO") : absl::OkStatus();
  });
  EXPECT_FALSE(file->Sync().ok());
  fs.set_hook(nullptr);
  ASSERT_TRUE(file->Append("second").ok());
  EXPECT_TRUE(file->Sync().ok());
  EXPECT_EQ(*fs.ReadFile("a"), "firstsecond");  // from the page cache
  fs.Crash();
  EXPECT_EQ(*fs.ReadFile("a"), std::string(5, '\0') + "second");
}

TEST(FakeFileSystemTest, AFullDiskTakesWhatFits) {
  FakeFileSystem fs(4);
  fs.set_capacity(10);
  const auto file = Make(fs, "a");
  EXPECT_EQ(*fs.FreeSpace("."), 10u);
  ASSERT_TRUE(file->Append("1234567").ok());
  EXPECT_EQ(file->Append("89012").code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*fs.ReadFile("a"), "1234567890");
  EXPECT_EQ(*fs.FreeSpace("."), 0u);
  ASSERT_TRUE(fs.RemoveFile("a").ok());
  EXPECT_EQ(*fs.FreeSpace("."), 10u);
}

TEST(FakeFileSystemTest, TheHookSeesEveryOperationAndMayBeSlow) {
  FakeFileSystem fs(5);
  uint64_t clock_us = 0;
  std::vector<Operation> seen;
  fs.set_hook([&](Operation operation, const std::string&, uint64_t bytes) {
    seen.push_back(operation);
    clock_us += 10 + bytes;
    return absl::OkStatus();
  });
  const auto file = Make(fs, "a");
  ASSERT_TRUE(file->Append("12345").ok());
  ASSERT_TRUE(file->Sync().ok());
  ASSERT_TRUE(file->Close().ok());
  EXPECT_THAT(seen, ElementsAre(Operation::kCreate, Operation::kAppend, Operation::kSync, Operation::kClose));
  EXPECT_EQ(clock_us, 45u);
}

TEST(FakeFileSystemTest, AProcessCrashLosesLocksAndFilesButNoBytes) {
  FakeFileSystem fs(6);
  auto lock = fs.Lock("LOCK");
  ASSERT_TRUE(lock.ok());
  const auto file = Make(fs, "a");
  ASSERT_TRUE(file->Append("unsynced").ok());
  fs.CrashProcess();
  EXPECT_FALSE(file->Append("x").ok());
  const auto next = fs.Lock("LOCK");
  EXPECT_TRUE(next.ok());
  lock->reset();  // of the dead process: must not free the successor's
  EXPECT_FALSE(fs.Lock("LOCK").ok());
  EXPECT_EQ(*fs.ReadFile("a"), "unsynced");
}

TEST(FakeFileSystemTest, FlipsOneBit) {
  FakeFileSystem fs(7);
  ASSERT_TRUE(Make(fs, "a")->Append("aa").ok());
  EXPECT_TRUE(fs.FlipBit("a", 9));
  EXPECT_EQ(*fs.ReadFile("a"), "ac");
  EXPECT_FALSE(fs.FlipBit("a", 16));
  EXPECT_FALSE(fs.FlipBit("b", 0));
}

}  // namespace
}  // namespace precondor
