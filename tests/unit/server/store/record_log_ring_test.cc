// SPDX-License-Identifier: Apache-2.0
// A log whose last records are in a ring.
#include <csignal>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/byte_codec.h"
#include "server/store/crc32c.h"
#include "server/store/log_ring.h"
#include "server/store/posix_file_system.h"
#include "server/store/record_log.h"
#include "server/store/record_log_format.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_dir.h"

namespace precondor::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Operation = FakeFileSystem::Operation;

constexpr uint64_t kRing = LogRing::kLeastBytes;

// Of any length, and unlike those of other numbers.
std::string Payload(uint64_t number, size_t length) {
  std::string bytes(length, '\0');
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<char>(number * 131 + i * 7 + i / 251);
  return bytes;
}

class RecordLogRingTest : public ::testing::Test {
 protected:
  absl::Status Reopen(RecordLogOptions options = {.ring_bytes = kRing}) {
    log_ = nullptr;
    replayed_.clear();
    auto log = RecordLog::Open(fs_, "log", options, [this](const Record& record) {
      replayed_.emplace_back(record.payload);
      return absl::OkStatus();
    });
    if (!log.ok()) return log.status();
    log_ = *std::move(log);
    return absl::OkStatus();
  }
  void Append(absl::string_view payload) {
    const auto sequence = log_->Append(1, payload);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
  }
  // The process dies as it is.
  absl::Status Kill(RecordLogOptions options = {.ring_bytes = kRing}) {
    fs_.CrashProcess();
    return Reopen(options);
  }
  uint64_t Writes() const { return writes_; }
  void CountWrites() {
    fs_.set_hook([this](Operation operation, const std::string&, uint64_t) {
      if (operation == Operation::kAppend) ++writes_;
      return absl::OkStatus();
    });
  }
  void DamageRing(uint64_t offset) { ASSERT_TRUE(fs_.FlipBit("log/ring", offset * 8 + 3)); }

  FakeFileSystem fs_{13};
  std::unique_ptr<RecordLog> log_;
  std::vector<std::string> replayed_;
  uint64_t writes_ = 0;
};

TEST_F(RecordLogRingTest, AppendsWriteNothingAndOutliveTheProcess) {
  ASSERT_TRUE(Reopen().ok());
  ASSERT_TRUE(log_->has_ring());
  CountWrites();
  Append("one");
  Append("two");
  EXPECT_EQ(Writes(), 0u);
  ASSERT_TRUE(log_->Sync().ok());
  EXPECT_EQ(Writes(), 1u);
  Append("three");
  EXPECT_EQ(Writes(), 1u);
  ASSERT_TRUE(Kill().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two", "three"));
  Append("four");
  ASSERT_TRUE(Kill().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two", "three", "four"));
}

TEST_F(RecordLogRingTest, AFullRingIsWrittenOutByWhoeverAppends) {
  for (const uint64_t segment_bytes : {uint64_t{500}, uint64_t{5000}, uint64_t{1} << 26}) {
    fs_ = FakeFileSystem(segment_bytes);
    const RecordLogOptions options{.segment_bytes = segment_bytes, .ring_bytes = kRing};
    ASSERT_TRUE(Reopen(options).ok());
    std::vector<std::string> all;
    for (uint64_t i = 0; i < 300; ++i) {
      // Some longer than the ring, so that they pass by it.
      all.push_back(Payload(i, i % 50 == 49 ? 3 * kRing + i : i % 7 * 400));
      Append(all.back());
      ASSERT_TRUE(i % 100 != 50 || Kill(options).ok());
    }
    ASSERT_TRUE(Kill(options).ok());
    EXPECT_EQ(replayed_, all) << segment_bytes;
    ASSERT_TRUE(log_->Sync().ok());
    fs_.Crash();
    ASSERT_TRUE(Reopen(options).ok());
    EXPECT_EQ(replayed_, all) << segment_bytes;
  }
}

TEST_F(RecordLogRingTest, SegmentsEndInZerosAndAreDroppedFromTheFront) {
  const RecordLogOptions options{.segment_bytes = 100, .ring_bytes = 16 * kRing};
  ASSERT_TRUE(Reopen(options).ok());
  for (uint64_t i = 1; i <= 20; ++i) Append(Payload(i, 30));
  // Two records of 17 + 30 bytes after a header of 24 reach 100: two a segment, of which only the first has a file.
  EXPECT_EQ(fs_.files().size(), 1u + 2u);
  ASSERT_TRUE(log_->DropBefore(100).ok());
  EXPECT_EQ(log_->first_sequence(), 1u);
  ASSERT_TRUE(log_->Sync().ok());
  EXPECT_EQ(fs_.files().size(), 10u + 2u);
  for (const std::string& path : fs_.files()) {
    if (!absl::EndsWith(path, ".log")) continue;
    EXPECT_EQ(*fs_.FileSize(path) % kBlockBytes, 0u) << path;
  }
  ASSERT_TRUE(log_->DropBefore(6).ok());
  EXPECT_EQ(log_->first_sequence(), 5u);
  ASSERT_TRUE(Kill(options).ok());
  EXPECT_EQ(replayed_.size(), 16u);
  EXPECT_EQ(replayed_.front(), Payload(5, 30));
  EXPECT_EQ(log_->torn_bytes(), 0u);
}

TEST_F(RecordLogRingTest, WhatIsTornInTheRingEndsIt) {
  ASSERT_TRUE(Reopen().ok());
  for (const char* payload : {"one", "two", "three"}) Append(payload);
  const uint64_t second = kBlockBytes + kSegmentHeaderBytes + kRecordHeaderBytes + 3;
  fs_.CrashProcess();
  DamageRing(second + kRecordHeaderBytes);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("one"));
  EXPECT_EQ(*log_->Append(1, "again"), 2u);
  ASSERT_TRUE(Kill().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "again"));
}

TEST_F(RecordLogRingTest, OneFloorIsEnoughAndNoneIsDataLoss) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  ASSERT_TRUE(log_->Sync().ok());  // a second floor, in the first place
  Append("two");
  fs_.CrashProcess();
  DamageRing(1024);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two"));
  fs_.CrashProcess();
  for (const uint64_t place : {1024, 2048}) DamageRing(place);
  const absl::Status status = Reopen();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("log/ring"));
}

TEST_F(RecordLogRingTest, ADamagedOrNewerRingIsRefused) {
  ASSERT_TRUE(Reopen().ok());
  fs_.CrashProcess();
  DamageRing(12);
  EXPECT_EQ(Reopen().code(), absl::StatusCode::kDataLoss);
  DamageRing(12);
  ASSERT_TRUE(Reopen().ok());
  log_ = nullptr;
  std::string header("PCONRING");
  PutU32(header, 2);
  PutU64(header, kRing);
  PutU32(header, Crc32c(header));
  ASSERT_TRUE(fs_.RemoveFile("log/ring").ok());
  ASSERT_TRUE((*fs_.Create("log/ring"))->Append(header).ok());
  EXPECT_EQ(Reopen().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(RecordLogRingTest, ARingThatBeginsAfterTheSegmentsIsAGap) {
  ASSERT_TRUE(Reopen().ok());
  const std::string before = *fs_.ReadFile("log/00000000000000000001.log");
  Append("one");
  ASSERT_TRUE(log_->Sync().ok());
  Append("two");
  fs_.CrashProcess();
  ASSERT_TRUE(fs_.RemoveFile("log/00000000000000000001.log").ok());
  ASSERT_TRUE((*fs_.Create("log/00000000000000000001.log"))->Append(before).ok());
  const absl::Status status = Reopen();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("begins with record 2, the segments end before 1"));
}

TEST_F(RecordLogRingTest, ADiskThatCannotMapGetsWrites) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  fs_.set_can_map(false);
  ASSERT_TRUE(Kill().ok());
  EXPECT_THAT(replayed_, ElementsAre("one"));
  EXPECT_FALSE(log_->has_ring());
  EXPECT_EQ(log_->ring_status().code(), absl::StatusCode::kUnimplemented) << log_->ring_status();
  EXPECT_THAT(fs_.files(), ElementsAre("log/00000000000000000001.log", "log/LOCK"));
  CountWrites();
  Append("two");
  EXPECT_GT(Writes(), 0u);
  fs_.set_can_map(true);
  ASSERT_TRUE(Kill().ok());
  EXPECT_TRUE(log_->has_ring());
  EXPECT_THAT(replayed_, ElementsAre("one", "two"));
}

TEST_F(RecordLogRingTest, OnAFullDiskItTakesWhatItHasRoomFor) {
  ASSERT_TRUE(Reopen().ok());
  fs_.set_capacity(fs_.used_bytes());
  uint64_t taken = 0;
  while (taken < 100 && log_->Append(1, Payload(taken, 1000)).ok()) ++taken;
  EXPECT_GE(taken, 8u);
  EXPECT_LE(taken, kRing / 1000);
  EXPECT_EQ(log_->health().code(), absl::StatusCode::kResourceExhausted) << log_->health();
  EXPECT_EQ(Reopen().code(), absl::StatusCode::kResourceExhausted);
  fs_.set_capacity(std::nullopt);
  ASSERT_TRUE(Reopen().ok());
  ASSERT_EQ(replayed_.size(), taken);  // none that it took is lost
  EXPECT_EQ(replayed_.back(), Payload(taken - 1, 1000));
}

TEST_F(RecordLogRingTest, ADiskWithoutRoomForARingGetsWrites) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  fs_.CrashProcess();
  fs_.set_capacity(fs_.used_bytes() + kRing / 2);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_FALSE(log_->has_ring());
  EXPECT_EQ(log_->ring_status().code(), absl::StatusCode::kResourceExhausted) << log_->ring_status();
  EXPECT_THAT(replayed_, ElementsAre("one"));
  Append("two");
  fs_.set_capacity(std::nullopt);
  ASSERT_TRUE(Kill().ok());
  EXPECT_TRUE(log_->has_ring());
  EXPECT_THAT(replayed_, ElementsAre("one", "two"));
}

TEST_F(RecordLogRingTest, AReaderSeesWhatIsInTheRingOfALogInUse) {
  ASSERT_TRUE(Reopen({.segment_bytes = 100, .ring_bytes = kRing}).ok());
  std::vector<std::string> all;
  for (uint64_t i = 1; i <= 12; ++i) {
    all.push_back(Payload(i, 60));
    Append(all.back());
    ASSERT_TRUE(i != 5 || log_->Sync().ok());
  }
  std::vector<std::string> seen;
  const auto contents = ReadLog(fs_, "log", [&seen](const Record& record) {
    seen.emplace_back(record.payload);
    return absl::OkStatus();
  });
  ASSERT_TRUE(contents.ok()) << contents.status();
  EXPECT_EQ(seen, all);
  EXPECT_EQ(contents->next_sequence, 13u);
  Append("the owner goes on");
}

TEST_F(RecordLogRingTest, RefusesARingOfNoUse) {
  for (const uint64_t bytes : {kRing - kBlockBytes, kRing + 1}) {
    EXPECT_EQ(Reopen({.ring_bytes = bytes}).code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
}

// The real disk, and a process that is really killed.
TEST(RecordLogKillTest, EveryRecordOutlivesItsProcess) {
  constexpr uint64_t kBytes = uint64_t{1} << 20, kRecords = 500;
  const auto length = [](uint64_t i) { return i == 300 ? 2 * kBytes : i * 7919 % 50'000; };
  const TempDir temp;
  const std::string dir = JoinPath(temp.path(), "log");
  const RecordLogOptions options{.segment_bytes = 3'000'000, .ring_bytes = kBytes};
  const pid_t child = fork();
  if (child == 0) {
    PosixFileSystem fs;
    const auto log = RecordLog::Open(fs, dir, options, nullptr);
    if (!log.ok()) _exit(1);
    for (uint64_t i = 0; i < kRecords; ++i) {
      if (!(*log)->Append(1, Payload(i, length(i))).ok()) _exit(2);
    }
    raise(SIGKILL);
  }
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
  PosixFileSystem fs;
  uint64_t seen = 0;
  const auto log = RecordLog::Open(fs, dir, options, [&](const Record& record) {
    EXPECT_EQ(record.payload, Payload(seen, length(seen))) << seen;
    ++seen;
    return absl::OkStatus();
  });
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(seen, kRecords);
}

}  // namespace
}  // namespace precondor::store
