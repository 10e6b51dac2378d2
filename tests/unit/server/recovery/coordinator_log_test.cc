// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/coordinator_log.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/random.h"
#include "server/recovery/record_codec.h"
#include "tests/support/fake_file_system.h"
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"
#include "tests/unit/server/recovery/sample_records.h"

namespace precondor::recovery {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using Operation = FakeFileSystem::Operation;

constexpr CoordinatorLogOptions kSmall = {.compact_bytes = 4000, .log = {.segment_bytes = 2000}};

LeaseRecord LeaseThrough(uint64_t session_id, uint64_t step) {
  LeaseRecord record = {session_id, SampleLease()};
  record.lease.durable_through = step;
  return record;
}

class CoordinatorLogTest : public ::testing::Test {
 protected:
  absl::Status Reopen() {
    log_ = nullptr;
    auto opened = CoordinatorLog::Open(fs_, "coordinator", kSmall);
    if (!opened.ok()) return opened.status();
    log_ = std::move(opened->journal);
    records_ = std::move(opened->records);
    return absl::OkStatus();
  }
  void SetUp() override { ASSERT_TRUE(Reopen().ok()); }
  void ExpectRecords(const std::vector<CoordinatorRecord>& expected) {
    ASSERT_EQ(records_.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(Same(records_[i], expected[i])) << i;
  }

  FakeFileSystem fs_{3};
  std::unique_ptr<CoordinatorLog> log_;
  std::vector<CoordinatorRecord> records_;
};

TEST_F(CoordinatorLogTest, EveryRecordThatWasAppendedSurvivesACrashOfTheMachine) {
  EXPECT_THAT(records_, SizeIs(0));
  const std::vector<CoordinatorRecord> written = {SampleSession(1), MembershipRecord{1, SampleMembership()},
                                                  LeaseThrough(1, 5), CloseRecord{1}};
  for (const CoordinatorRecord& record : written) ASSERT_TRUE(log_->Append(record).ok());
  fs_.Crash();
  ASSERT_TRUE(Reopen().ok());
  ExpectRecords(written);
}

TEST_F(CoordinatorLogTest, ACompactionTakesThePlaceOfAllBefore) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  uint64_t step = 0;
  while (!log_->wants_compaction()) ASSERT_TRUE(log_->Append(LeaseThrough(1, ++step)).ok());
  EXPECT_GT(step, 5u);
  const uint64_t before = fs_.used_bytes();
  ASSERT_TRUE(log_->Compact({SampleSession(1), SampleSession(2, "other")}).ok());
  EXPECT_FALSE(log_->wants_compaction());
  ASSERT_TRUE(log_->Append(CloseRecord{2}).ok());
  EXPECT_LT(fs_.used_bytes(), before);
  fs_.Crash();
  ASSERT_TRUE(Reopen().ok());
  ExpectRecords({SampleSession(1), SampleSession(2, "other"), CloseRecord{2}});
  // Known to the next process too: the next one is due after as many bytes as the first.
  uint64_t again = 0;
  while (!log_->wants_compaction()) ASSERT_TRUE(log_->Append(LeaseThrough(1, ++again)).ok());
  EXPECT_GT(again, 5u);
}

TEST_F(CoordinatorLogTest, AnUnfinishedCompactionCountsForNothing) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  // The process dies at every operation of the compaction in turn.
  for (uint64_t operations = 0;; ++operations) {
    uint64_t left = operations;
    fs_.set_hook([&left](Operation, const std::string&, uint64_t) {
      return left == 0 ? absl::UnavailableError("dying") : (--left, absl::OkStatus());
    });
    const bool done = log_->Compact({SampleSession(1), SampleSession(2, "other")}).ok();
    fs_.set_hook(nullptr);
    fs_.CrashProcess();
    ASSERT_TRUE(Reopen().ok());
    if (done) break;
    ASSERT_TRUE(records_.size() == 1 || records_.size() == 2) << operations;
    EXPECT_TRUE(Same(records_[0], SampleSession(1))) << operations;
    if (records_.size() == 2) break;  // failed after its end was written
  }
  ExpectRecords({SampleSession(1), SampleSession(2, "other")});
}

TEST_F(CoordinatorLogTest, ALogWithoutItsBeginningIsRefused) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  uint64_t step = 0;
  while (fs_.files().size() < 4) ASSERT_TRUE(log_->Append(LeaseThrough(1, ++step)).ok());  // two locks, two segments
  log_ = nullptr;
  ASSERT_TRUE(fs_.RemoveFile("coordinator/log/00000000000000000001.log").ok());
  EXPECT_THAT(Reopen(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("has no whole compaction")));
}

TEST_F(CoordinatorLogTest, ATornEndIsCutOff) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  fs_.set_hook([](Operation operation, const std::string&, uint64_t) {
    return operation == Operation::kSync ? absl::UnavailableError("power") : absl::OkStatus();
  });
  EXPECT_FALSE(log_->Append(LeaseThrough(1, 5)).ok());
  fs_.set_hook(nullptr);
  fs_.Crash();
  ASSERT_TRUE(Reopen().ok());
  ASSERT_TRUE(records_.size() == 1 || records_.size() == 2);
  EXPECT_TRUE(Same(records_[0], SampleSession(1)));
}

TEST_F(CoordinatorLogTest, DamageIsNamed) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  ASSERT_TRUE(log_->Append(CloseRecord{1}).ok());
  log_ = nullptr;
  const std::string path = "coordinator/log/00000000000000000001.log";
  ASSERT_TRUE(fs_.FlipBit(path, 8 * 100));
  EXPECT_THAT(Reopen(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(absl::StrCat(path, " at offset 24"))));
}

TEST_F(CoordinatorLogTest, ADirectoryOfAnotherVersionIsRefusedAndLeftAsItIs) {
  log_ = nullptr;
  {
    auto log = store::RecordLog::Open(fs_, "coordinator/log", kSmall.log, nullptr);
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_TRUE((*log)->Append(kLeaderRecord, std::string("\6\1\0\0\0\0\0\0\0", 9)).ok());
  }
  const std::string path = "coordinator/log/00000000000000000001.log";
  const std::string before = fs_.ReadFile(path).value();
  EXPECT_THAT(Reopen(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       "coordinator: record 1: coordinator record: format: expected 8, got 6, of another version: "
                       "docs/operate/operations.md#upgrade says how to go on"));
  EXPECT_EQ(fs_.ReadFile(path).value(), before);
}

TEST_F(CoordinatorLogTest, OneCoordinatorADirectory) {
  EXPECT_EQ(CoordinatorLog::Open(fs_, "coordinator", kSmall).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(CoordinatorLogTest, GoesOnByItselfOnceTheDiskHasRoom) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  fs_.set_capacity(fs_.used_bytes() + 100);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(log_->Append(LeaseThrough(1, 5)).code(), absl::StatusCode::kResourceExhausted);
  }
  fs_.set_capacity(1 << 20);
  EXPECT_TRUE(log_->Append(LeaseThrough(1, 6)).ok());
  EXPECT_TRUE(log_->wants_compaction()) << "what failed may be in the log";
  ASSERT_TRUE(log_->Compact({SampleSession(1)}).ok());
  EXPECT_FALSE(log_->wants_compaction());
  ASSERT_TRUE(log_->Append(LeaseThrough(1, 7)).ok());
  fs_.Crash();
  ASSERT_TRUE(Reopen().ok());
  ExpectRecords({SampleSession(1), LeaseThrough(1, 7)});
}

TEST_F(CoordinatorLogTest, DoesNotGoOnWithoutWhatWasDurable) {
  ASSERT_TRUE(log_->Append(SampleSession(1)).ok());
  fs_.set_hook([](Operation operation, const std::string&, uint64_t) {
    return operation == Operation::kSync ? absl::UnavailableError("EIO") : absl::OkStatus();
  });
  EXPECT_FALSE(log_->Append(CloseRecord{1}).ok());
  fs_.set_hook(nullptr);
  ASSERT_TRUE(fs_.RemoveFile("coordinator/log/00000000000000000001.log").ok());
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(log_->Append(SampleSession(2)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("expected 1, which was durable")));
  }
}

// The last grant that the records have, by session.
std::map<uint64_t, uint64_t> GrantedBySession(const std::vector<CoordinatorRecord>& records) {
  std::map<uint64_t, uint64_t> granted;
  for (const CoordinatorRecord& record : records) {
    if (const auto* session = std::get_if<SessionRecord>(&record)) {
      granted[session->session_id] = session->lease.durable_through;
    } else if (const auto* lease = std::get_if<LeaseRecord>(&record)) {
      const auto found = granted.find(lease->session_id);
      if (found != granted.end()) found->second = lease->lease.durable_through;
    } else if (const auto* close = std::get_if<CloseRecord>(&record)) {
      granted.erase(close->session_id);
    }
  }
  return granted;
}

// A coordinator's life in small: it announces what was appended, compacts when asked to, and dies at any operation.
TEST(CoordinatorLogCrashTest, NothingThatWasAnnouncedIsForgotten) {
  uint64_t crashes = 0, compactions = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    FakeFileSystem fs(seed);
    const CounterRandom random(std::vector<uint64_t>{seed, 31});
    uint64_t counter = 0;
    const auto next = [&](uint64_t bound) { return random.Bits(counter++) % bound; };
    std::map<uint64_t, uint64_t> announced;  // session -> granted through
    std::map<uint64_t, uint64_t> in_doubt;   // what the record that failed last said; ~0: closed
    for (int life = 0; life < 15; ++life) {
      auto opened = CoordinatorLog::Open(fs, "coordinator", kSmall);
      ASSERT_TRUE(opened.ok()) << opened.status();
      std::map<uint64_t, uint64_t> found = GrantedBySession(opened->records);
      for (const auto& [session, through] : in_doubt) {  // either way is right
        const bool landed = through == ~uint64_t{0} ? found.count(session) == 0 : found[session] == through;
        if (landed && through == ~uint64_t{0}) announced.erase(session);
        if (landed && through != ~uint64_t{0}) announced[session] = through;
        if (!landed && found[session] == 0) found.erase(session);
      }
      ASSERT_EQ(found, announced);
      in_doubt.clear();

      uint64_t left = next(120);
      fs.set_hook([&left](Operation, const std::string&, uint64_t) {
        return left == 0 ? absl::UnavailableError("dying") : (--left, absl::OkStatus());
      });
      while (true) {
        const uint64_t session = 1 + next(4), choice = next(10), through = 1 + counter;
        CoordinatorRecord record = LeaseThrough(session, through);
        uint64_t says = through;
        if (announced.count(session) == 0) {
          SessionRecord open = SampleSession(session);
          open.lease.durable_through = through;
          record = open;
        } else if (choice == 0) {
          record = CloseRecord{session};
          says = ~uint64_t{0};
        }
        if (!opened->journal->Append(record).ok()) {
          in_doubt[session] = says;
          break;
        }
        if (says == ~uint64_t{0}) {
          announced.erase(session);
        } else {
          announced[session] = says;
        }
        if (!opened->journal->wants_compaction()) continue;
        std::vector<CoordinatorRecord> live;
        for (const auto& [id, granted] : announced) {
          SessionRecord open = SampleSession(id);
          open.lease.durable_through = granted;
          live.emplace_back(open);
        }
        compactions += opened->journal->Compact(live).ok();
        if (left == 0) break;
      }
      fs.set_hook(nullptr);
      fs.Crash();
      ++crashes;
    }
  }
  EXPECT_EQ(crashes, 1500u);
  EXPECT_GT(compactions, 200u);
}

class StoredCoordinatorTest : public CoordinatorFixture {
 protected:
  StoredCoordinatorTest() {
    spec.method.name = "mkor";  // a record has only methods that have messages
    options.make_method = [](const MethodConfig&) {
      return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
    };
  }
  void Restart() {
    coordinator = nullptr;
    log_ = nullptr;
    auto opened = CoordinatorLog::Open(fs_, "coordinator", kSmall);
    ASSERT_TRUE(opened.ok()) << opened.status();
    log_ = std::move(opened->journal);
    journal_in_use = log_.get();
    MakeCoordinator();
    const absl::Status restored = coordinator->Restore(opened->records);
    ASSERT_TRUE(restored.ok()) << restored;
  }

  FakeFileSystem fs_{9};
  std::unique_ptr<CoordinatorLog> log_;
};

TEST_F(StoredCoordinatorTest, ComesBackFromItsDiskAfterManyStepsAndCompactions) {
  Restart();
  const uint64_t id = Open();
  JoinAll();
  uint64_t granted = 0;
  for (uint64_t step = 0; step < 400; ++step) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto directive = coordinator->ReportStep(Report(id, 1, rank, step, 1.0 / (1.0 + step)));
      ASSERT_TRUE(directive.ok()) << directive.status();
      granted = directive->lease_through_step;
    }
  }
  EXPECT_LT(fs_.used_bytes(), 20000u) << "the log is compacted";
  const SessionSpec opened = coordinator->GetSession("job")->spec;
  fs_.Crash();
  Restart();
  const auto summary = coordinator->GetSession("job");
  ASSERT_TRUE(summary.ok()) << summary.status();
  EXPECT_EQ(summary->session_id, id);
  EXPECT_EQ(summary->spec, opened);
  EXPECT_EQ(summary->joined, 2u);
  EXPECT_GE(coordinator->JoinSession("job", 0, 5, 400)->directive.lease_through_step, granted);
}

TEST_F(StoredCoordinatorTest, RefusesOnAFullDiskAndGoesOnWhenThereIsRoom) {
  Restart();
  Open();
  fs_.set_capacity(fs_.used_bytes());
  EXPECT_THAT(coordinator->JoinSession("job", 0, 5, 0),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("disk full")));
  EXPECT_EQ(coordinator->GetSession("job")->joined, 0u);
  spec.name = "another";
  EXPECT_EQ(coordinator->OpenSession(spec).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(coordinator->GetSession("another").ok());

  fs_.set_capacity(1 << 20);
  EXPECT_TRUE(coordinator->JoinSession("job", 0, 6, 0).ok());
  fs_.Crash();
  Restart();
  EXPECT_EQ(coordinator->GetSession("job")->joined, 1u);
  EXPECT_FALSE(coordinator->GetSession("another").ok()) << "it was refused";
}

}  // namespace
}  // namespace precondor::recovery
