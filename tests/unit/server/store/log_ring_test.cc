// SPDX-License-Identifier: Apache-2.0
// A log that an earlier version wrote, with its last records in a ring.
#include "server/store/log_ring.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/byte_codec.h"
#include "server/store/crc32c.h"
#include "server/store/record_log.h"
#include "server/store/record_log_format.h"
#include "tests/support/fake_file_system.h"

namespace precondor::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kRing = 4 * kBlockBytes;

std::string Encode(uint64_t sequence, absl::string_view payload) {
  return absl::StrCat(EncodeRecordHeader(sequence, 1, {&payload, 1}), payload);
}

std::string WithChecksum(std::string bytes) {
  PutU32(bytes, Crc32c(bytes));
  return bytes;
}

class LogRingTest : public ::testing::Test {
 protected:
  // Two records in a segment.
  void SetUp() override {
    ASSERT_TRUE(Open().ok());
    for (const char* payload : {"one", "two"}) ASSERT_TRUE(log_->Append(1, payload).ok());
    ASSERT_TRUE(log_->Sync().ok());
    log_ = nullptr;
    position_ = *fs_.FileSize("log/00000000000000000001.log");
  }
  absl::Status Open() {
    log_ = nullptr;
    replayed_.clear();
    auto log = RecordLog::Open(fs_, "log", {}, [this](const Record& record) {
      replayed_.emplace_back(record.payload);
      return absl::OkStatus();
    });
    if (!log.ok()) return log.status();
    log_ = *std::move(log);
    return absl::OkStatus();
  }
  // Writes a ring whose floor is at the segment's end, where the record `sequence` begins. `stream` follows the floor.
  void Write(absl::string_view stream, uint64_t sequence = 3, uint32_t version = 1, uint64_t bytes = kRing) {
    std::string file("PCONRING");
    PutU32(file, version);
    PutU64(file, bytes);
    file = WithChecksum(std::move(file));
    file.resize(kBlockBytes + kRing, '\0');
    for (const auto& [number, place] : {std::pair<uint64_t, size_t>(1, 2048), {2, 1024}}) {
      std::string floor;
      PutU64(floor, number);
      PutU64(floor, number == 2 ? position_ : 0);
      PutU64(floor, number == 2 ? sequence : 1);
      floor = WithChecksum(std::move(floor));
      file.replace(place, floor.size(), floor);
    }
    for (size_t i = 0; i < stream.size(); ++i) file[kBlockBytes + (position_ + i) % kRing] = stream[i];
    const auto ring = fs_.Create("log/ring");
    ASSERT_TRUE(ring.ok()) << ring.status();
    ASSERT_TRUE((*ring)->Append(file).ok() && (*ring)->Sync().ok() && fs_.SyncDir("log").ok());
  }
  // Records 3 and 4, and 5 at the beginning of a segment in the next block.
  std::string Stream() const {
    std::string stream = absl::StrCat(Encode(3, "three"), EncodeRecordHeader(4, kSyncMark, {}), Encode(4, "four"));
    stream.resize(NextBlock(position_ + stream.size()) - position_, '\0');
    return absl::StrCat(stream, EncodeSegmentHeader(5), Encode(5, "five"));
  }
  absl::Status Refused() {
    const absl::Status status = Open();
    EXPECT_THAT(std::string(status.message()), HasSubstr("log/ring"));
    return status;
  }

  FakeFileSystem fs_{13};
  uint64_t position_ = 0;
  std::unique_ptr<RecordLog> log_;
  std::vector<std::string> replayed_;
};

TEST_F(LogRingTest, ItsRecordsMoveToTheSegmentAndItGoes) {
  Write(Stream());
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two", "three", "four", "five"));
  EXPECT_EQ(log_->next_sequence(), 6u);
  EXPECT_TRUE(absl::IsNotFound(fs_.FileSize("log/ring").status()));
  fs_.Crash();
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two", "three", "four", "five"));
}

TEST_F(LogRingTest, ATornRecordEndsIt) {
  const std::string stream = absl::StrCat(Encode(3, "three"), Encode(4, "four"));
  Write(stream.substr(0, stream.size() - 1));
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two", "three"));
}

// The floor that was written before is older: its record 1 is at the beginning of the stream.
TEST_F(LogRingTest, OneOfTwoFloorsMayBeTorn) {
  Write("");
  ASSERT_TRUE(fs_.FlipBit("log/ring", uint64_t{8} * 1030));
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(replayed_, ElementsAre("one", "two"));
  Write("");
  ASSERT_TRUE(fs_.FlipBit("log/ring", uint64_t{8} * 1030));
  ASSERT_TRUE(fs_.FlipBit("log/ring", uint64_t{8} * 2050));
  EXPECT_EQ(Refused().code(), absl::StatusCode::kDataLoss);
}

TEST_F(LogRingTest, RefusesWhatItCannotRead) {
  Write("", /*sequence=*/4);
  EXPECT_EQ(Refused().code(), absl::StatusCode::kDataLoss);  // record 3 is missing
  ASSERT_TRUE(fs_.RemoveFile("log/ring").ok());
  Write("", 3, /*version=*/2);
  EXPECT_EQ(Refused().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(fs_.RemoveFile("log/ring").ok());
  Write("", 3, 1, /*bytes=*/kRing + kBlockBytes);
  EXPECT_EQ(Refused().code(), absl::StatusCode::kDataLoss);
  ASSERT_TRUE(fs_.RemoveFile("log/ring").ok());
  Write("");
  ASSERT_TRUE(fs_.FlipBit("log/ring", 100));
  EXPECT_EQ(Refused().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace precondor::store
