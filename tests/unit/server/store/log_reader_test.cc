// SPDX-License-Identifier: Apache-2.0
#include "server/store/log_reader.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/store/record_log.h"
#include "tests/support/fake_file_system.h"

namespace precondor::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Operation = FakeFileSystem::Operation;

class LogReaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto log = RecordLog::Open(fs_, "log", {.segment_bytes = 100}, nullptr);
    ASSERT_TRUE(log.ok()) << log.status();
    log_ = *std::move(log);
  }
  // Each record goes to seen_, as "sequence:type:payload".
  absl::StatusOr<LogContents> Read() {
    seen_.clear();
    return ReadLog(fs_, "log", [this](const Record& record) {
      seen_.push_back(absl::StrCat(record.sequence, ":", record.type, ":", record.payload));
      return absl::OkStatus();
    });
  }
  std::map<std::string, std::string> Files() {
    std::map<std::string, std::string> all;
    for (const std::string& path : fs_.files()) all[path] = *fs_.ReadFile(path);
    return all;
  }

  FakeFileSystem fs_{5};
  std::unique_ptr<RecordLog> log_;
  std::vector<std::string> seen_;
};

TEST_F(LogReaderTest, ReadsALogInUseAndChangesNothing) {
  for (const char* payload : {"one", "two"}) ASSERT_TRUE(log_->Append(7, payload).ok());
  const std::string large(100, 'x');
  ASSERT_TRUE(log_->Append(8, large).ok());
  ASSERT_TRUE(log_->Append(9, "in the second segment").ok());
  const auto unfinished = fs_.Create("log/00000000000000000005.log.tmp");  // of a segment that the owner is making
  ASSERT_TRUE(unfinished.ok());
  const auto before = Files();
  fs_.set_hook([](Operation operation, const std::string& path, uint64_t) {
    const bool reads = operation == Operation::kRead || operation == Operation::kList;
    return reads ? absl::OkStatus() : absl::InternalError(absl::StrCat(path, ": a reader writes"));
  });
  const auto contents = Read();
  fs_.set_hook(nullptr);
  ASSERT_TRUE(contents.ok()) << contents.status();
  EXPECT_THAT(seen_, ElementsAre("1:7:one", "2:7:two", "3:8:" + large, "4:9:in the second segment"));
  EXPECT_EQ(contents->next_sequence, 5u);
  EXPECT_EQ(contents->torn_bytes, 0u);
  ASSERT_EQ(contents->segments.size(), 2u);
  EXPECT_EQ(contents->segments.back().first_sequence, 4u);
  EXPECT_EQ(Files(), before);
  EXPECT_TRUE(log_->Append(1, "the owner goes on").ok());
}

TEST_F(LogReaderTest, EndsWithWhatIsWholeWhereTheOwnerIsWriting) {
  ASSERT_TRUE(log_->Append(1, "whole").ok());
  ASSERT_TRUE(log_->Append(1, "half").ok());
  ASSERT_TRUE(fs_.FlipBit("log/00000000000000000001.log",
                          8 * (kSegmentHeaderBytes + 2 * kRecordHeaderBytes + std::string("whole").size())));
  const auto contents = Read();
  ASSERT_TRUE(contents.ok()) << contents.status();
  EXPECT_THAT(seen_, ElementsAre("1:1:whole"));
  EXPECT_EQ(contents->torn_bytes, kRecordHeaderBytes + std::string("half").size());
}

TEST_F(LogReaderTest, SaysThatASegmentWasRemovedMeanwhile) {
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(log_->Append(1, std::string(90, 'a')).ok());
  bool dropped = false;
  fs_.set_hook([&](Operation operation, const std::string& path, uint64_t) {
    if (operation == Operation::kRead && absl::EndsWith(path, ".log") && !std::exchange(dropped, true)) {
      EXPECT_TRUE(log_->DropBefore(3).ok());
    }
    return absl::OkStatus();
  });
  const auto contents = Read();
  EXPECT_EQ(contents.status().code(), absl::StatusCode::kAborted) << contents.status();
  EXPECT_THAT(std::string(contents.status().message()), HasSubstr("00000000000000000001.log"));
  EXPECT_TRUE(Read().ok());
  EXPECT_EQ(seen_.front(), "3:1:" + std::string(90, 'a'));
}

TEST_F(LogReaderTest, ADirectoryThatIsNotThere) {
  EXPECT_EQ(ReadLog(fs_, "elsewhere", nullptr).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(fs_.MakeDir("empty").ok());
  const auto contents = ReadLog(fs_, "empty", nullptr);
  ASSERT_TRUE(contents.ok()) << contents.status();
  EXPECT_THAT(contents->segments, IsEmpty());
  EXPECT_EQ(contents->next_sequence, 1u);
}

}  // namespace
}  // namespace precondor::store
