// SPDX-License-Identifier: Apache-2.0
#include "server/store/record_log.h"

#include <csignal>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/byte_codec.h"
#include "kernels/base/mutex.h"
#include "server/store/crc32c.h"
#include "server/store/log_reader.h"
#include "server/store/posix_file_system.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_dir.h"

namespace precondor::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Operation = FakeFileSystem::Operation;

class RecordLogTest : public ::testing::Test {
 protected:
  // Each record that the log hands out goes to replayed_, as "sequence:type:payload".
  absl::Status Reopen(RecordLogOptions options = {}) {
    log_ = nullptr;
    replayed_.clear();
    auto log = RecordLog::Open(fs_, "log", options, [this](const Record& record) {
      replayed_.push_back(absl::StrCat(record.sequence, ":", record.type, ":", record.payload));
      return absl::OkStatus();
    });
    if (!log.ok()) return log.status();
    log_ = *std::move(log);
    return absl::OkStatus();
  }
  void Append(absl::string_view payload, uint8_t type = 1) {
    const auto sequence = log_->Append(type, payload);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
  }
  std::string OnlySegment() {
    std::string found;
    for (const std::string& path : fs_.files()) {
      if (path.size() > 4 && path.substr(path.size() - 4) == ".log") found = path;
    }
    return found;
  }
  // A damaged byte in the file, permanently.
  void Damage(const std::string& path, uint64_t offset) { ASSERT_TRUE(fs_.FlipBit(path, offset * 8 + 3)) << path; }
  void Fail(Operation broken, absl::Status error) {
    fs_.set_hook([=](Operation operation, const std::string&, uint64_t) {
      return operation == broken ? error : absl::OkStatus();
    });
  }

  FakeFileSystem fs_{11};
  std::unique_ptr<RecordLog> log_;
  std::vector<std::string> replayed_;
};

TEST_F(RecordLogTest, GivesRecordsBackInOrder) {
  ASSERT_TRUE(Reopen().ok());
  EXPECT_EQ(log_->next_sequence(), 1u);
  EXPECT_EQ(*log_->Append(7, "one"), 1u);
  EXPECT_EQ(*log_->Append(255, ""), 2u);
  EXPECT_EQ(log_->synced_before(), 1u);
  ASSERT_TRUE(log_->Sync().ok());
  EXPECT_EQ(log_->synced_before(), 3u);
  EXPECT_EQ(*log_->Append(7, std::string("\0\1", 2)), 3u);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("1:7:one", "2:255:", std::string("3:7:\0\1", 6)));
  EXPECT_EQ(log_->next_sequence(), 4u);
  EXPECT_EQ(log_->synced_before(), 4u);
  EXPECT_EQ(log_->torn_bytes(), 0u);
}

TEST_F(RecordLogTest, OpeningManyTimesAddsNothing) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  ASSERT_TRUE(Reopen().ok());
  const uint64_t size = log_->size_bytes();
  EXPECT_EQ(size, fs_.used_bytes());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Reopen().ok());
  EXPECT_EQ(log_->size_bytes(), size);
  EXPECT_THAT(replayed_, ElementsAre("1:1:one"));
}

TEST_F(RecordLogTest, SegmentsFollowOneAnotherAndAreDroppedFromTheFront) {
  ASSERT_TRUE(Reopen({.segment_bytes = 100}).ok());
  for (int i = 1; i <= 20; ++i) Append(std::string(30, static_cast<char>('a' + i)));
  // Two records of 17 + 30 bytes after a header of 24 reach 100: two a segment.
  EXPECT_EQ(fs_.files().size(), 10u + 1u);
  ASSERT_TRUE(log_->DropBefore(6).ok());
  EXPECT_EQ(log_->first_sequence(), 5u);  // shares its segment with 6
  ASSERT_TRUE(log_->DropBefore(100).ok());
  EXPECT_EQ(log_->first_sequence(), 19u);  // never the last segment
  ASSERT_TRUE(Reopen({.segment_bytes = 100}).ok());
  EXPECT_EQ(replayed_.size(), 2u);
  EXPECT_EQ(log_->first_sequence(), 19u);
  EXPECT_EQ(*log_->Append(1, "next"), 21u);
}

TEST_F(RecordLogTest, ATornEndIsCutOffAndTheLogGoesOn) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  ASSERT_TRUE(log_->Sync().ok());
  Append("two");
  log_ = nullptr;
  Damage(OnlySegment(), *fs_.FileSize(OnlySegment()) - 1);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("1:1:one"));
  EXPECT_EQ(log_->torn_bytes(), kRecordHeaderBytes + 3);
  EXPECT_EQ(*log_->Append(1, "new"), 2u);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("1:1:one", "2:1:new"));
}

TEST_F(RecordLogTest, EveryDamagedByteOfASyncedRecordIsNamedWithItsFile) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  ASSERT_TRUE(log_->Sync().ok());
  Append("two");
  ASSERT_TRUE(log_->Sync().ok());
  Append("three, not synced");
  log_ = nullptr;
  const std::string path = OnlySegment();
  const uint64_t one = kSegmentHeaderBytes, mark = one + kRecordHeaderBytes + 3, two = mark + kRecordHeaderBytes;
  for (uint64_t offset = 0; offset < two + kRecordHeaderBytes + 3; ++offset) {
    Damage(path, offset);
    const absl::Status status = Reopen();
    const uint64_t where = offset < one ? 0 : offset < mark ? one : offset < two ? mark : two;
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << offset << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(path, " at offset ", where, ":"))) << offset;
    Damage(path, offset);  // the second flip mends it
  }
  EXPECT_TRUE(Reopen().ok());
  EXPECT_EQ(replayed_.size(), 3u);
}

TEST_F(RecordLogTest, DamageInAnEarlierSegmentIsDataLossEvenAtItsEnd) {
  ASSERT_TRUE(Reopen({.segment_bytes = 50}).ok());
  for (int i = 0; i < 3; ++i) Append(std::string(40, 'x'));
  log_ = nullptr;
  const std::string path = "log/00000000000000000002.log";
  Damage(path, *fs_.FileSize(path) - 1);
  const absl::Status status = Reopen({.segment_bytes = 50});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(path, " at offset 24: record 2")));
}

TEST_F(RecordLogTest, AMissingSegmentIsDataLoss) {
  ASSERT_TRUE(Reopen({.segment_bytes = 50}).ok());
  for (int i = 0; i < 3; ++i) Append(std::string(40, 'x'));
  log_ = nullptr;
  ASSERT_TRUE(fs_.RemoveFile("log/00000000000000000002.log").ok());
  const absl::Status status = Reopen({.segment_bytes = 50});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("00000000000000000003.log"));
}

// Magic, the version, first sequence 1, and a checksum that fits.
std::string HeaderOfVersion(uint32_t version) {
  std::string header("PCONDLOG");
  PutU32(header, version);
  PutU64(header, 1);
  PutU32(header, Crc32c(header));
  return header;
}

TEST_F(RecordLogTest, AnotherFormatIsRefusedAndLeftAsItIs) {
  ASSERT_TRUE(fs_.MakeDir("log").ok());
  const std::string header = EncodeSegmentHeader(1);
  ASSERT_EQ(header, HeaderOfVersion(2));
  EXPECT_TRUE(CheckSegmentHeader(header, 1).ok());
  EXPECT_EQ(CheckSegmentHeader(header, 2).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(CheckSegmentHeader(header.substr(0, 20), 1).code(), absl::StatusCode::kDataLoss);
  const std::string path = "log/00000000000000000001.log";
  for (const uint32_t version : {1, 3}) {
    const std::string other = HeaderOfVersion(version);
    ASSERT_TRUE((*fs_.Create(path))->Append(other).ok());
    const absl::Status status = Reopen();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(),
              absl::StrCat(path, " at offset 0: log segment: format: expected 2, got ", version,
                           ", of another version: docs/operate/operations.md#upgrade says how to go on"));
    EXPECT_EQ(fs_.ReadFile(path).value(), other);
    ASSERT_TRUE(fs_.RemoveFile(path).ok());
  }
}

TEST_F(RecordLogTest, OneLogADirectory) {
  ASSERT_TRUE(Reopen().ok());
  const auto second = RecordLog::Open(fs_, "log", {}, nullptr);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("log/LOCK"));
  log_ = nullptr;
  EXPECT_TRUE(RecordLog::Open(fs_, "log", {}, nullptr).ok());
}

TEST_F(RecordLogTest, RefusesWhatItCannotHold) {
  ASSERT_TRUE(Reopen({.max_record_bytes = 3}).ok());
  EXPECT_EQ(log_->Append(0, "a").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(log_->Append(1, "four").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(log_->Append(1, "abc").ok());  // neither poisons
  EXPECT_EQ(Reopen({.max_record_bytes = uint64_t{1} << 32}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(RecordLogTest, AfterAFailedSyncNothingIsEverCalledDurableAgain) {
  ASSERT_TRUE(Reopen().ok());
  Append("kept");
  ASSERT_TRUE(log_->Sync().ok());
  Append("doomed");
  Fail(Operation::kSync, absl::UnavailableError("EIO"));
  EXPECT_EQ(log_->Sync().code(), absl::StatusCode::kUnavailable);
  fs_.set_hook(nullptr);
  EXPECT_EQ(log_->Sync().code(), absl::StatusCode::kUnavailable);
  const absl::Status refused = log_->Append(1, "late").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("must be opened again: EIO"));
  EXPECT_EQ(log_->health(), refused);
  EXPECT_EQ(log_->synced_before(), 2u);
  // Opened again, it reads "doomed" from the page cache and makes it last by writing it anew.
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("1:1:kept", "2:1:doomed"));
  fs_.Crash();
  ASSERT_TRUE(Reopen().ok());
  EXPECT_THAT(replayed_, ElementsAre("1:1:kept", "2:1:doomed"));
}

TEST_F(RecordLogTest, AFullDiskPoisonsAndDroppingMakesRoom) {
  ASSERT_TRUE(Reopen({.segment_bytes = 100}).ok());
  fs_.set_capacity(1000);
  absl::Status full;
  uint64_t appended = 0;
  for (; full.ok() && appended < 100; ++appended) full = log_->Append(1, std::string(30, 'x')).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(log_->Append(1, "").status().code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(log_->DropBefore(6).ok());
  ASSERT_TRUE(Reopen({.segment_bytes = 100}).ok());
  EXPECT_EQ(replayed_.front(), absl::StrCat("5:1:", std::string(30, 'x')));
  EXPECT_EQ(log_->next_sequence(), appended);  // the last one failed
  EXPECT_TRUE(log_->Append(1, "more").ok());
}

TEST_F(RecordLogTest, AnErrorOfTheReaderEndsOpen) {
  ASSERT_TRUE(Reopen().ok());
  Append("one");
  log_ = nullptr;
  const auto log = RecordLog::Open(fs_, "log", {}, [](const Record&) { return absl::InternalError("no"); });
  EXPECT_EQ(log.status(), absl::InternalError("no"));
  EXPECT_TRUE(Reopen().ok());  // the lock was given back
}

// The real disk, with a file whose Sync waits until it is told to end.
class SlowSyncFileSystem final : public PosixFileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    auto file = PosixFileSystem::Create(path);
    if (!file.ok()) return file;
    return std::make_unique<File>(*this, *std::move(file));
  }
  void Hold() {
    MutexLock lock(mu_);
    held_ = true;
  }
  void Release() {
    MutexLock lock(mu_);
    held_ = false;
    changed_.notify_all();
  }
  void AwaitSync() {
    mu_.Lock();
    while (waiting_ == 0) changed_.wait(mu_);
    mu_.Unlock();
  }
  int syncs() {
    MutexLock lock(mu_);
    return syncs_;
  }

 private:
  class File final : public WritableFile {
   public:
    File(SlowSyncFileSystem& fs, std::unique_ptr<WritableFile> file) : fs_(fs), file_(std::move(file)) {}
    absl::Status Append(absl::string_view bytes) override { return file_->Append(bytes); }
    absl::Status Sync() override {
      fs_.mu_.Lock();
      ++fs_.syncs_;
      ++fs_.waiting_;
      fs_.changed_.notify_all();
      while (fs_.held_) fs_.changed_.wait(fs_.mu_);
      --fs_.waiting_;
      fs_.mu_.Unlock();
      return file_->Sync();
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    SlowSyncFileSystem& fs_;
    const std::unique_ptr<WritableFile> file_;
  };

  Mutex mu_;
  CondVar changed_;
  bool held_ ABSL_GUARDED_BY(mu_) = false;
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
  int syncs_ ABSL_GUARDED_BY(mu_) = 0;
};

TEST(RecordLogThreadsTest, AppendsGoOnDuringASyncThatDoesNotCoverThem) {
  const TempDir temp;
  SlowSyncFileSystem fs;
  auto log = RecordLog::Open(fs, JoinPath(temp.path(), "log"), {}, nullptr);
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_TRUE((*log)->Append(1, "before").ok());
  fs.Hold();
  std::thread syncer([&] { EXPECT_TRUE((*log)->Sync().ok()); });
  fs.AwaitSync();
  EXPECT_EQ(*(*log)->Append(1, "during"), 2u);  // would hang here
  fs.Release();
  syncer.join();
  EXPECT_EQ((*log)->synced_before(), 2u);
  // The mark of that sync stands after "during", which it does not cover: damaged, that is a torn end.
  log->reset();
  const std::string path = JoinPath(temp.path(), "log/00000000000000000001.log");
  std::string bytes = *fs.ReadFile(path);
  bytes[bytes.size() - kRecordHeaderBytes - 1] ^= 1;
  ASSERT_TRUE(fs.RemoveFile(path).ok());
  ASSERT_TRUE((*fs.Create(path))->Append(bytes).ok());
  log = RecordLog::Open(fs, JoinPath(temp.path(), "log"), {}, nullptr);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ((*log)->next_sequence(), 2u);
}

TEST(RecordLogThreadsTest, ManyThreadsShareSyncsAndLoseNothing) {
  constexpr int kThreads = 4, kRecords = 200;
  const TempDir temp;
  SlowSyncFileSystem fs;
  auto log = RecordLog::Open(fs, JoinPath(temp.path(), "log"), {.segment_bytes = 4096}, nullptr);
  ASSERT_TRUE(log.ok()) << log.status();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRecords; ++i) {
        const auto sequence = (*log)->Append(static_cast<uint8_t>(t + 1), absl::StrCat(i));
        ASSERT_TRUE(sequence.ok()) << sequence.status();
        ASSERT_TRUE((*log)->Sync().ok());
        ASSERT_GT((*log)->synced_before(), *sequence);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  log->reset();
  std::vector<int> next(kThreads, 0);
  uint64_t sequence = 0;
  log = RecordLog::Open(fs, JoinPath(temp.path(), "log"), {.segment_bytes = 4096}, [&](const Record& record) {
    EXPECT_EQ(record.sequence, ++sequence);
    EXPECT_EQ(record.payload, absl::StrCat(next[record.type - 1]++));
    return absl::OkStatus();
  });
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_THAT(next, ::testing::Each(kRecords));
}

// The real disk, and a process that is really killed.
TEST(RecordLogKillTest, EveryRecordOutlivesItsProcess) {
  constexpr uint64_t kRecords = 500;
  const auto payload = [](uint64_t i) {
    return std::string(i == 300 ? size_t{2} << 20 : i * 7919 % 50'000, static_cast<char>(i * 131));
  };
  const TempDir temp;
  const std::string dir = JoinPath(temp.path(), "log");
  const RecordLogOptions options{.segment_bytes = 3'000'000};
  const pid_t child = fork();
  if (child == 0) {
    PosixFileSystem fs;
    const auto log = RecordLog::Open(fs, dir, options, nullptr);
    if (!log.ok()) _exit(1);
    for (uint64_t i = 0; i < kRecords; ++i) {
      if (!(*log)->Append(1, payload(i)).ok()) _exit(2);
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
    EXPECT_EQ(record.payload, payload(seen)) << seen;
    ++seen;
    return absl::OkStatus();
  });
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(seen, kRecords);
}

}  // namespace
}  // namespace precondor::store
