// SPDX-License-Identifier: Apache-2.0
#include "server/store/snapshot_store.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/random.h"
#include "server/store/crc32c.h"
#include "server/store/posix_file_system.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_dir.h"

namespace precondor::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Operation = FakeFileSystem::Operation;
using Contents = std::map<std::string, std::string>;

absl::Status Write(SnapshotStore& store, uint64_t id, const Contents& contents, absl::string_view metadata = "meta") {
  auto writer = store.Begin(id);
  if (!writer.ok()) return writer.status();
  for (const auto& [key, bytes] : contents) {
    if (absl::Status added = (*writer)->Add(key, bytes); !added.ok()) return added;
  }
  return (*writer)->Commit(metadata);
}

Contents ReadAll(const SnapshotStore& store, const SnapshotManifest& manifest) {
  Contents contents;
  for (const auto& [key, file] : manifest.files) {
    const auto bytes = store.Read(manifest, key);
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    if (bytes.ok()) contents[key] = *bytes;
  }
  return contents;
}

class SnapshotStoreTest : public ::testing::Test {
 protected:
  void Reopen() {
    store_ = nullptr;
    auto store = SnapshotStore::Open(fs_, "snapshots");
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void SetUp() override { Reopen(); }

  const Contents kContents = {{"layer-0", "zero"}, {"layer-1", std::string("\0\1", 2)}, {"empty", ""}};
  FakeFileSystem fs_{5};
  std::unique_ptr<SnapshotStore> store_;
};

TEST_F(SnapshotStoreTest, GivesBackWhatWasWritten) {
  ASSERT_TRUE(Write(*store_, 7, kContents, "step 7").ok());
  Reopen();
  EXPECT_THAT(*store_->List(), ElementsAre(7));
  const auto manifest = store_->Verify(7);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->id, 7u);
  EXPECT_EQ(manifest->metadata, "step 7");
  EXPECT_EQ(ReadAll(*store_, *manifest), kContents);
  EXPECT_EQ(store_->Read(*manifest, "layer-2").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Verify(8).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SnapshotStoreTest, IsNotThereBeforeCommitAndLeavesNothingBehind) {
  {
    auto writer = store_->Begin(1);
    ASSERT_TRUE((*writer)->Add("a", "bytes").ok());
    EXPECT_THAT(*store_->List(), IsEmpty());
    EXPECT_EQ(store_->Begin(1).status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_EQ((*writer)->Add("a", "other").code(), absl::StatusCode::kAlreadyExists);
  }
  EXPECT_THAT(fs_.files(), ElementsAre("snapshots/LOCK"));
  EXPECT_TRUE(Write(*store_, 1, kContents).ok());
  EXPECT_EQ(store_->Begin(1).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(SnapshotStoreTest, RefusesKeysThatAreNoFileNames) {
  auto writer = store_->Begin(1);
  for (const std::string& key : {std::string(), std::string("."), std::string("a/b"), std::string("ä"),
                                 std::string("a b"), std::string(129, 'k')}) {
    EXPECT_EQ((*writer)->Add(key, "").code(), absl::StatusCode::kInvalidArgument) << key;
  }
  EXPECT_TRUE((*writer)->Add(std::string(128, 'k'), "").ok());
  EXPECT_TRUE((*writer)->Add("MANIFEST", "not the manifest").ok());
  ASSERT_TRUE((*writer)->Commit("").ok());
  EXPECT_EQ((*writer)->Commit("").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*store_->Read(*store_->Verify(1), "MANIFEST"), "not the manifest");
}

TEST_F(SnapshotStoreTest, SkipsADamagedOneAndNamesTheFile) {
  for (const uint64_t id : {1, 2, 3}) ASSERT_TRUE(Write(*store_, id, kContents, absl::StrCat(id)).ok());
  const std::string broken = "snapshots/00000000000000000003/layer-1.snap";
  ASSERT_TRUE(fs_.FlipBit(broken, 8 * 12 + 1));
  ASSERT_TRUE(fs_.RemoveFile("snapshots/00000000000000000002/layer-0.snap").ok());
  const auto found = store_->LatestValid();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->manifest.id, 1u);
  ASSERT_THAT(found->skipped, SizeIs(2));
  EXPECT_EQ(found->skipped[0].code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(found->skipped[0].message()), HasSubstr(broken));
  EXPECT_EQ(found->skipped[1].code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(found->skipped[1].message()), HasSubstr("00000000000000000002/layer-0.snap"));
}

TEST_F(SnapshotStoreTest, FindsEveryInvertedBit) {
  ASSERT_TRUE(Write(*store_, 1, {{"a", "some bytes"}}).ok());
  for (const std::string name : {"MANIFEST", "a.snap"}) {
    const std::string path = absl::StrCat("snapshots/00000000000000000001/", name);
    for (uint64_t bit = 0; fs_.FlipBit(path, bit); ++bit) {
      const absl::Status status = store_->Verify(1).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << path << " bit " << bit << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
      fs_.FlipBit(path, bit);
    }
  }
  EXPECT_TRUE(store_->Verify(1).ok());
}

TEST_F(SnapshotStoreTest, AFileOfAnotherSnapshotIsNotTakenForThisOnes) {
  ASSERT_TRUE(Write(*store_, 1, {{"a", "same"}}).ok());
  ASSERT_TRUE(Write(*store_, 2, {{"a", "same"}}).ok());
  ASSERT_TRUE(fs_.RemoveFile("snapshots/00000000000000000002/MANIFEST").ok());
  const std::string manifest = *fs_.ReadFile("snapshots/00000000000000000001/MANIFEST");
  ASSERT_TRUE((*fs_.Create("snapshots/00000000000000000002/MANIFEST"))->Append(manifest).ok());
  EXPECT_THAT(std::string(store_->Verify(2).status().message()), HasSubstr("snapshot 1, expected 2"));
}

TEST_F(SnapshotStoreTest, SaysThatThereIsNone) {
  EXPECT_EQ(store_->LatestValid().status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(Write(*store_, 1, {{"a", "x"}}).ok());
  ASSERT_TRUE(fs_.FlipBit("snapshots/00000000000000000001/MANIFEST", 0));
  const absl::Status status = store_->LatestValid().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("00000000000000000001/MANIFEST"));
}

TEST_F(SnapshotStoreTest, ANewerFormatIsNamed) {
  const SnapshotManifest manifest = {1, "", {}};
  std::string bytes = EncodeManifest(manifest);
  ASSERT_EQ(bytes.substr(0, 12), std::string("PCONDMAN\1\0\0\0", 12));
  bytes[8] = 2;
  bytes.resize(bytes.size() - 4);
  PutU32(bytes, Crc32c(bytes));
  const absl::Status status = DecodeManifest(bytes, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("format 2"));
}

// A newer version of the program wrote it: the older one is no substitute.
TEST_F(SnapshotStoreTest, ANewerFormatIsNotDamageForWhichAnOlderSnapshotServes) {
  for (const uint64_t id : {1, 2}) ASSERT_TRUE(Write(*store_, id, kContents).ok());
  const std::string path = "snapshots/00000000000000000002/MANIFEST";
  std::string bytes = *fs_.ReadFile(path);
  bytes[8] = 2;
  bytes.resize(bytes.size() - 4);
  PutU32(bytes, Crc32c(bytes));
  ASSERT_TRUE(fs_.RemoveFile(path).ok());
  ASSERT_TRUE((*fs_.Create(path))->Append(bytes).ok());
  const absl::Status status = store_->LatestValid().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path + ": has format 2, of a newer version"));
  ASSERT_TRUE(store_->Remove(2).ok());
  EXPECT_EQ(store_->LatestValid()->manifest.id, 1u);
}

TEST_F(SnapshotStoreTest, RemovesASnapshotOnce) {
  for (const uint64_t id : {3, 10}) ASSERT_TRUE(Write(*store_, id, kContents).ok());
  ASSERT_TRUE(store_->Remove(3).ok());
  EXPECT_THAT(*store_->List(), ElementsAre(10));
  ASSERT_TRUE(store_->Remove(10).ok());
  EXPECT_TRUE(store_->Remove(10).ok());
  EXPECT_THAT(fs_.files(), ElementsAre("snapshots/LOCK"));
}

TEST_F(SnapshotStoreTest, AFullDiskLeavesTheOldOneAndNoRest) {
  ASSERT_TRUE(Write(*store_, 1, kContents).ok());
  const uint64_t used = fs_.used_bytes();
  fs_.set_capacity(used + 2000);
  EXPECT_EQ(Write(*store_, 2, {{"a", "x"}, {"b", std::string(5000, 'x')}}).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(fs_.used_bytes(), used);
  EXPECT_EQ(store_->LatestValid()->manifest.id, 1u);
}

TEST_F(SnapshotStoreTest, AFailedSyncIsNoSnapshot) {
  const auto fail = [this](Operation broken, bool fails) {
    fs_.set_hook([=](Operation operation, const std::string&, uint64_t) {
      return fails && operation == broken ? absl::UnavailableError("EIO") : absl::OkStatus();
    });
  };
  {
    auto writer = store_->Begin(1);
    ASSERT_TRUE((*writer)->Add("a", "x").ok());
    fail(Operation::kSync, true);
    EXPECT_EQ((*writer)->Commit("").code(), absl::StatusCode::kUnavailable);
    fail(Operation::kSync, false);
    EXPECT_EQ((*writer)->Commit("").code(), absl::StatusCode::kFailedPrecondition) << "the bytes may be lost";
  }
  {
    auto writer = store_->Begin(1);
    fail(Operation::kAppend, true);
    EXPECT_EQ((*writer)->Add("a", "x").code(), absl::StatusCode::kUnavailable);
    fail(Operation::kAppend, false);
    EXPECT_TRUE((*writer)->Add("b", "x").ok());
    EXPECT_EQ((*writer)->Commit("").code(), absl::StatusCode::kFailedPrecondition) << "a file is missing";
  }
  EXPECT_THAT(*store_->List(), IsEmpty());
}

TEST_F(SnapshotStoreTest, ManyFilesAreSyncedInGroups) {
  uint64_t syncs = 0, most_unsynced = 0, unsynced = 0;
  fs_.set_hook([&](Operation operation, const std::string&, uint64_t) {
    unsynced += operation == Operation::kCreate;
    unsynced -= operation == Operation::kSync;
    syncs += operation == Operation::kSync;
    most_unsynced = std::max(most_unsynced, unsynced);
    return absl::OkStatus();
  });
  Contents contents;
  for (int i = 0; i < 150; ++i) contents[absl::StrCat("layer-", i)] = absl::StrCat(i);
  ASSERT_TRUE(Write(*store_, 1, contents).ok());
  EXPECT_EQ(syncs, 151u);  // with the manifest
  EXPECT_LE(most_unsynced, 64u) << "as many descriptors are open";
  fs_.set_hook(nullptr);
  fs_.Crash();
  Reopen();
  EXPECT_EQ(ReadAll(*store_, *store_->Verify(1)), contents);
}

TEST_F(SnapshotStoreTest, OneStoreADirectory) {
  EXPECT_EQ(SnapshotStore::Open(fs_, "snapshots").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SnapshotStoreThreadsTest, LayersAreWrittenSideBySide) {
  const TempDir temp;
  PosixFileSystem fs;
  auto store = SnapshotStore::Open(fs, JoinPath(temp.path(), "snapshots"));
  ASSERT_TRUE(store.ok()) << store.status();
  auto writer = (*store)->Begin(1);
  ASSERT_TRUE(writer.ok()) << writer.status();
  Contents expected;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 8; ++i) expected[absl::StrCat(t, "-", i)] = std::string(1000 * i, static_cast<char>(t));
    threads.emplace_back([&writer, t] {
      for (int i = 0; i < 8; ++i) {
        EXPECT_TRUE((*writer)->Add(absl::StrCat(t, "-", i), std::string(1000 * i, static_cast<char>(t))).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE((*writer)->Commit("").ok());
  EXPECT_EQ(ReadAll(**store, *(*store)->Verify(1)), expected);
}

// Crashes, failures and full disks at any moment of writing and removing: a snapshot whose Commit returned OK is there
// until it is removed, and whatever is there is whole.
TEST(SnapshotStoreCrashTest, WhatWasCommittedIsThereAndWhole) {
  uint64_t crashes = 0, unfinished = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    FakeFileSystem fs(seed);
    const CounterRandom random(std::vector<uint64_t>{seed, 29});
    uint64_t counter = 0;
    const auto next = [&](uint64_t bound) { return random.Bits(counter++) % bound; };
    std::map<uint64_t, Contents> written;
    uint64_t last_committed = 0;
    for (uint64_t round = 1; round <= 12; ++round) {
      auto store = SnapshotStore::Open(fs, "snapshots");
      ASSERT_TRUE(store.ok()) << store.status();
      const std::vector<uint64_t> ids = *(*store)->List();
      for (const uint64_t id : ids) {
        const auto manifest = (*store)->Verify(id);
        ASSERT_TRUE(manifest.ok()) << manifest.status();
        ASSERT_EQ(manifest->metadata, absl::StrCat("meta ", id));
        ASSERT_EQ(ReadAll(**store, *manifest), written.at(id));
      }
      ASSERT_TRUE(last_committed == 0 || absl::c_linear_search(ids, last_committed)) << last_committed;
      for (const std::string& path : fs.files()) ASSERT_FALSE(absl::StrContains(path, ".tmp/")) << path;

      // Something fails after so many operations, and all that follow: the process is about to die.
      uint64_t left = next(60);
      fs.set_hook([&left, &unfinished](Operation, const std::string&, uint64_t) {
        if (left > 0) return --left, absl::OkStatus();
        ++unfinished;
        return absl::UnavailableError("dying");
      });
      Contents contents;
      for (uint64_t i = 0; i < 1 + next(4); ++i) contents[absl::StrCat("k", i)] = std::string(next(9000), 'a' + i);
      written[round] = contents;
      if (Write(**store, round, contents, absl::StrCat("meta ", round)).ok()) last_committed = round;
      if (last_committed > 1) (*store)->Remove(last_committed - 1).IgnoreError();
      fs.set_hook(nullptr);
      fs.Crash();
      ++crashes;
      store->reset();
    }
  }
  EXPECT_EQ(crashes, 3600u);
  EXPECT_GT(unfinished, 1000u);
}

}  // namespace
}  // namespace precondor::store
