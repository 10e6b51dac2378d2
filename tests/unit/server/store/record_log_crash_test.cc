// SPDX-License-Identifier: Apache-2.0
// Random lives of a log on a disk that crashes, fills up and fails: what was synced is there, nothing else is invented.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "kernels/base/random.h"
#include "server/store/record_log.h"
#include "tests/support/fake_file_system.h"

namespace precondor::store {
namespace {

using Operation = FakeFileSystem::Operation;

class Life {
 public:
  explicit Life(uint64_t seed) : fs_(seed), random_(std::vector<uint64_t>{seed, 17}) {}

  void Run() {
    Open();
    for (int i = 0; i < 120 && !::testing::Test::HasFailure(); ++i) Turn();
  }
  uint64_t crashes() const { return crashes_; }
  uint64_t lost() const { return lost_; }

 private:
  uint64_t Random(uint64_t bound) { return random_.Bits(counter_++) % bound; }

  void Turn() {
    const uint64_t choice = Random(100);
    if (choice < 55) {
      Append();
    } else if (choice < 75) {
      if (log_->Sync().ok()) durable_before_ = written_.size() + 1;
    } else if (choice < 80) {
      const uint64_t before = Random(written_.size() + 2);
      dropped_before_ = std::max(dropped_before_, before);
      log_->DropBefore(before).IgnoreError();
    } else if (choice < 88) {
      BreakOne();
    } else if (choice < 92) {
      fs_.CrashProcess();
      // The bytes are in the page cache: nothing that was appended may be lost.
      const uint64_t lost = lost_;
      Open();
      EXPECT_EQ(lost_, lost);
    } else {
      fs_.Crash();
      ++crashes_;
      Open();
    }
  }

  void Append() {
    std::string payload(Random(Random(4) == 0 ? 6000 : 60), '\0');
    for (char& byte : payload) byte = static_cast<char>(Random(256));
    const auto sequence = log_->Append(static_cast<uint8_t>(1 + payload.size() % 255), payload);
    if (!sequence.ok()) {
      half_written_ = payload;  // may come back whole
      return;
    }
    ASSERT_EQ(*sequence, written_.size() + 1);
    written_.push_back(std::move(payload));
  }

  // One operation among the next few fails, then the log is opened again.
  void BreakOne() {
    uint64_t left = Random(6);
    const bool full = Random(2) == 0;
    fs_.set_hook([left, full](Operation operation, const std::string&, uint64_t) mutable {
      if (operation == Operation::kRead || operation == Operation::kList || left == 0 || --left > 0) {
        return absl::OkStatus();
      }
      return full ? absl::ResourceExhaustedError("full") : absl::UnavailableError("EIO");
    });
    for (int i = 0; i < 6 && log_->health().ok(); ++i) {
      Append();
      if (log_->Sync().ok()) durable_before_ = written_.size() + 1;
    }
    fs_.set_hook(nullptr);
    if (log_->health().ok()) return;
    EXPECT_FALSE(log_->Sync().ok());
    if (Random(2) == 0) {
      fs_.Crash();
      ++crashes_;
    }
    Open();
  }

  void Open() {
    log_ = nullptr;
    uint64_t last = 0;
    auto log = RecordLog::Open(fs_, "log", options_, [&](const Record& record) {
      if (last == 0) {
        EXPECT_LE(record.sequence, std::max<uint64_t>(1, dropped_before_));
      } else {
        EXPECT_EQ(record.sequence, last + 1);
      }
      last = record.sequence;
      if (record.sequence == written_.size() + 1 && half_written_.has_value()) {
        EXPECT_EQ(record.payload, *half_written_);
        written_.push_back(*half_written_);
        half_written_.reset();
      }
      if (record.sequence > written_.size()) {
        ADD_FAILURE() << "record " << record.sequence << " was never appended";
        return absl::OkStatus();
      }
      EXPECT_EQ(record.payload, written_[record.sequence - 1]) << record.sequence;
      EXPECT_EQ(record.type, 1 + record.payload.size() % 255) << record.sequence;
      return absl::OkStatus();
    });
    ASSERT_TRUE(log.ok()) << log.status();
    log_ = *std::move(log);
    ASSERT_GE(log_->next_sequence(), durable_before_);
    ASSERT_TRUE(last == 0 || log_->next_sequence() == last + 1) << last;
    lost_ += written_.size() + 1 - log_->next_sequence();
    written_.resize(log_->next_sequence() - 1);
    half_written_.reset();
    durable_before_ = log_->next_sequence();
  }

  FakeFileSystem fs_;
  const CounterRandom random_;
  const RecordLogOptions options_ = {.segment_bytes = 2000};
  uint64_t counter_ = 0;
  std::unique_ptr<RecordLog> log_;
  std::vector<std::string> written_;  // by sequence - 1
  std::optional<std::string> half_written_;
  uint64_t durable_before_ = 1;
  uint64_t dropped_before_ = 0;
  uint64_t crashes_ = 0;
  uint64_t lost_ = 0;
};

TEST(RecordLogCrashTest, WhatWasSyncedIsThereAndNothingElseIsInvented) {
  uint64_t crashes = 0, lost = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Life life(seed);
    life.Run();
    if (HasFailure()) return;
    crashes += life.crashes();
    lost += life.lost();
  }
  // The disk was bad enough for this to mean something.
  EXPECT_GT(crashes, 1000u);
  EXPECT_GT(lost, 500u);
}

// A bit of a log of many synced records and segments rots: DataLoss, or the records of one unsynced end are missing.
TEST(RecordLogDamageTest, ARottenBitNeverGivesAWrongRecord) {
  uint64_t refused = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    FakeFileSystem fs(seed);
    const CounterRandom random(std::vector<uint64_t>{seed, 23});
    {
      auto log = RecordLog::Open(fs, "log", {.segment_bytes = 300}, nullptr);
      ASSERT_TRUE(log.ok()) << log.status();
      for (uint64_t i = 1; i <= 12; ++i) {
        ASSERT_TRUE((*log)->Append(1, std::string(random.Bits(i) % 80, static_cast<char>(i))).ok());
        ASSERT_TRUE(i == 12 || (*log)->Sync().ok());
      }
    }
    std::vector<std::string> segments;
    for (const std::string& path : fs.files()) {
      if (absl::EndsWith(path, ".log")) segments.push_back(path);
    }
    const std::string& path = segments[random.Bits(100) % segments.size()];
    ASSERT_TRUE(fs.FlipBit(path, random.Bits(101) % (*fs.FileSize(path) * 8)));
    uint64_t last = 0;
    const auto log = RecordLog::Open(fs, "log", {.segment_bytes = 300}, [&](const Record& record) {
      EXPECT_EQ(record.sequence, ++last);
      EXPECT_EQ(record.payload, std::string(random.Bits(last) % 80, static_cast<char>(last)));
      return absl::OkStatus();
    });
    if (log.ok()) {
      EXPECT_GE(last, 11u);  // the twelfth was not synced
    } else {
      EXPECT_EQ(log.status().code(), absl::StatusCode::kDataLoss) << log.status();
      ++refused;
    }
  }
  EXPECT_GT(refused, 250u);
}

}  // namespace
}  // namespace precondor::store
