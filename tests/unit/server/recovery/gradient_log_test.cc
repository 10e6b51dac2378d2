// SPDX-License-Identifier: Apache-2.0
#include "server/recovery/gradient_log.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "server/core/api/observer.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_file_system.h"

namespace precondor::recovery {
namespace {

constexpr uint64_t kJob = 7, kOther = 8;
constexpr uint64_t kRecordBytes = 100;  // of a gradient's values; a record has a few more

struct GapObserver final : StoreObserver {
  void OnGradientsMissing(absl::string_view train_job, bool missing) override {
    seen.emplace_back(std::string(train_job), missing);
  }
  std::vector<std::pair<std::string, bool>> seen;
};

class GradientLogTest : public ::testing::Test {
 protected:
  using Found = std::vector<std::pair<uint64_t, uint64_t>>;  // version and log_sequence, of kJob

  GradientLogTest() {
    options.background = false;
    fs.set_hook([this](FakeFileSystem::Operation operation, const std::string&, uint64_t) -> absl::Status {
      const bool fails = operation == FakeFileSystem::Operation::kAppend ? append_fails
                         : operation == FakeFileSystem::Operation::kSync ? sync_fails
                                                                         : false;
      return fails ? absl::UnavailableError("the disk fails") : absl::OkStatus();
    });
    EXPECT_TRUE(store::MakeDirDurably(fs, "data").ok());
  }

  Found Open() {
    log.reset();
    log = std::make_unique<GradientLog>(fs, "data/gradients", options, clock, logger, observer);
    Found found;
    const absl::Status opened = log->Open([&](const GradientRecord& record, uint64_t log_sequence) {
      EXPECT_EQ(record.average.bytes, Payload(kRecordBytes, static_cast<uint8_t>(record.factor_version)));
      EXPECT_EQ(record.average.scales[0], 0.5f);
      if (record.at.session_id == kJob) found.emplace_back(record.factor_version, log_sequence);
    });
    EXPECT_TRUE(opened.ok()) << opened;
    return found;
  }
  bool Append(uint64_t version, uint64_t session = kJob, uint64_t log_sequence = 3) {
    GradientRecord record{.at = {.session_id = session, .step = version}, .factor_version = version};
    record.average = {.samples = 1, .bytes = Payload(kRecordBytes, static_cast<uint8_t>(version)), .scales = {0.5f, 1}};
    return log->Append(session == kJob ? "job" : "other", record, log_sequence);
  }
  size_t Segments() const {
    size_t count = 0;
    for (const std::string& path : fs.files()) count += path.ends_with(".log") ? 1 : 0;
    return count;
  }

  FakeFileSystem fs{1};
  GradientLogOptions options;
  FakeClock clock;
  NullLogger logger;
  GapObserver observer;
  bool append_fails = false, sync_fails = false;
  std::unique_ptr<GradientLog> log;
};

TEST_F(GradientLogTest, GivesBackWhatWasAppendedAfterACrashOfTheProcess) {
  EXPECT_TRUE(Open().empty());
  for (uint64_t version = 0; version < 3; ++version) EXPECT_FALSE(Append(version, kJob, 10 + version));
  fs.CrashProcess();
  EXPECT_EQ(Open(), (Found{{0, 10}, {1, 11}, {2, 12}}));
  EXPECT_FALSE(log->LacksSince(kJob).has_value());
}

TEST_F(GradientLogTest, ACrashOfTheMachineCostsWhatWasNotSynced) {
  Open();
  Append(0);
  log->Work();
  Append(1);
  fs.Crash();
  const Found found = Open();
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].first, 0u);
}

TEST_F(GradientLogTest, CovariancesComeBackWithTheirRows) {
  Open();
  GradientRecord record{.at = {.session_id = kJob, .layer = 2, .step = 4, .updates = 1}, .factor_version = 5};
  record.covariances = {{.samples = 3, .bytes = Payload(8, 1), .rows = {4, 0}}, {.samples = 2, .bytes = Payload(4, 2)}};
  log->Append("job", record, 6);
  log.reset();
  log = std::make_unique<GradientLog>(fs, "data/gradients", options, clock, logger, observer);
  std::vector<GradientRecord> found;
  ASSERT_TRUE(log->Open([&found](GradientRecord one, uint64_t) { found.push_back(std::move(one)); }).ok());
  ASSERT_EQ(found.size(), 1u);
  ASSERT_EQ(found[0].covariances.size(), 2u);
  EXPECT_EQ(found[0].at.layer, 2u);
  EXPECT_EQ(found[0].covariances[0].rows, (std::array<int64_t, 2>{4, 0}));
  EXPECT_EQ(found[0].covariances[1].bytes, Payload(4, 2));
}

TEST_F(GradientLogTest, ASnapshotIsDueWhenTheBoundIsExceededAndAgainAfterAsMuchMore) {
  options.snapshot_bytes = 2 * kRecordBytes;
  Open();
  std::vector<uint64_t> due;
  for (uint64_t version = 0; version < 6; ++version) {
    if (Append(version)) due.push_back(version);
  }
  EXPECT_EQ(due, (std::vector<uint64_t>{1, 3, 5}));
  // The snapshot's state is so large that the next one is worth its bytes only much later.
  log->OnSnapshot(kJob, log->MarkOf(kJob), 10 * kRecordBytes);
  for (uint64_t version = 6; version < 12; ++version) EXPECT_FALSE(Append(version)) << version;
}

TEST_F(GradientLogTest, ADiskThatCannotKeepUpEndsTheGradientsUntilASnapshotAfterItHasCaughtUp) {
  options.backlog_bytes = 3 * kRecordBytes;
  Open();
  clock.Advance(absl::Seconds(100));
  for (uint64_t version = 0; version < 6; ++version) EXPECT_FALSE(Append(version));
  ASSERT_TRUE(log->LacksSince(kJob).has_value());
  EXPECT_EQ(*log->LacksSince(kJob), clock.Now());
  EXPECT_FALSE(log->LacksSince(kOther).has_value());
  clock.Advance(absl::Seconds(5));
  const GradientLog::Mark early = log->MarkOf(kJob);
  Append(6);
  log->OnSnapshot(kJob, early, 1);
  EXPECT_TRUE(log->LacksSince(kJob).has_value()) << "a gradient after that snapshot was dropped";
  log->Work();
  EXPECT_TRUE(Append(7)) << "a snapshot is due: gradients are written again";
  const GradientLog::Mark mark = log->MarkOf(kJob);
  EXPECT_FALSE(Append(8));
  EXPECT_TRUE(log->LacksSince(kJob).has_value());
  log->OnSnapshot(kJob, mark, 1);
  EXPECT_FALSE(log->LacksSince(kJob).has_value());
  EXPECT_EQ(observer.seen, (std::vector<std::pair<std::string, bool>>{{"job", true}, {"job", false}}));
  const Found found = Open();
  EXPECT_EQ(found.back().first, 8u);
}

TEST_F(GradientLogTest, ADiskThatFailsIsOpenedAgain) {
  Open();
  Append(0);
  Append(0, kOther);
  append_fails = true;
  EXPECT_FALSE(Append(1));
  EXPECT_TRUE(log->LacksSince(kJob).has_value());
  EXPECT_TRUE(log->LacksSince(kOther).has_value()) << "its records may be lost as well";
  EXPECT_EQ(log->MarkOf(kJob).sequence, 0u);
  EXPECT_FALSE(Append(2));
  append_fails = false;
  log->Work();
  EXPECT_TRUE(Append(3));
  sync_fails = true;
  log->Work();
  EXPECT_EQ(log->MarkOf(kJob).sequence, 0u);
}

TEST_F(GradientLogTest, NothingIsWrittenWhileTheShardsLogCannotBe) {
  Open();
  EXPECT_FALSE(Append(0, kJob, /*log_sequence=*/0));
  EXPECT_TRUE(log->LacksSince(kJob).has_value());
  EXPECT_TRUE(Open().empty());
}

TEST_F(GradientLogTest, SegmentsGoWhenTwoSnapshotsHoldThem) {
  options.segment_bytes = kRecordBytes;
  Open();
  for (uint64_t version = 0; version < 4; ++version) {
    Append(version);
    log->Work();
  }
  EXPECT_EQ(Segments(), 5u);
  log->OnSnapshot(kJob, log->MarkOf(kJob), 1);
  EXPECT_EQ(Segments(), 5u) << "the snapshot may turn out to be damaged";
  Append(4);
  log->Work();
  log->OnSnapshot(kJob, log->MarkOf(kJob), 1);
  EXPECT_LE(Segments(), 2u);
  EXPECT_EQ(Open(), (Found{{4, 3}}));
}

TEST_F(GradientLogTest, ASessionThatIsForgottenNeedsNothing) {
  options.segment_bytes = kRecordBytes;
  Open();
  Append(0);
  log->Work();
  Append(0, kOther);
  log->Work();
  log->Forget(kJob);
  EXPECT_TRUE(Open().empty());
  log->Forget(kOther);
  EXPECT_EQ(Segments(), 1u);
}

TEST_F(GradientLogTest, Off) {
  options.snapshot_bytes = 0;
  Open();
  EXPECT_FALSE(Append(0));
  EXPECT_TRUE(log->LacksSince(kJob).has_value());
  const GradientLog::Mark mark = log->MarkOf(kJob);
  log->OnSnapshot(kJob, mark, 1);
  EXPECT_FALSE(log->LacksSince(kJob).has_value()) << "a final snapshot holds everything";
  EXPECT_FALSE(Append(1));
  log->OnSnapshot(kJob, mark, 1);
  EXPECT_TRUE(log->LacksSince(kJob).has_value());
  EXPECT_TRUE(observer.seen.empty()) << "it was asked for";
  EXPECT_TRUE(Open().empty());
}

}  // namespace
}  // namespace precondor::recovery
