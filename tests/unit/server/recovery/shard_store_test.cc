// SPDX-License-Identifier: Apache-2.0
// A shard on a disk: lost at any step, with any of its files damaged or the disk full for a while.
#include "server/recovery/shard_store.h"

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>

#include "absl/strings/match.h"

#include "server/core/resources/reservation.h"
#include "server/recovery/layer_uploads.h"
#include "server/recovery/stored_session.h"
#include "server/store/crc32c.h"
#include "tests/support/damage_file.h"
#include "tests/support/wait_until.h"
#include "tests/unit/server/recovery/stored_shard_fixture.h"

namespace precondor::recovery {
namespace {

class ShardStoreTest : public StoredShardFixture {
 protected:
  absl::Status Reopen() { return StoredShardFixture::Reopen(fs, real_clock); }
  void Open() {
    const absl::Status status = Reopen();
    ASSERT_TRUE(status.ok()) << status;
    if (!shard->ListSessions().empty()) return;
    ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  }
  void FirstOrderStep(uint64_t step) {
    for (uint32_t layer : {0, 1}) {
      ContributionHeader header = Header(ContributionKind::kGradient, step, 0, layer);
      header.mode = Mode::kFirstOrder;
      EXPECT_EQ(SendFilled(header, 1)->decision(), Decision::kIdentity);
    }
  }
  std::vector<std::string> Files(const std::string& part) const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir.path() + "/data")) {
      if (entry.is_regular_file() && entry.path().string().find(part) != std::string::npos) {
        found.push_back(entry.path().string());
      }
    }
    std::sort(found.begin(), found.end());
    return found;
  }
};

TEST_F(ShardStoreTest, RemembersTheNewestCoordinator) {
  Open();
  ASSERT_TRUE(shard->Admit(7).ok());
  ASSERT_TRUE(shard->Admit(9).ok());
  Open();
  EXPECT_THAT(shard->Admit(8), ReasonIs(ErrorReason::kStaleLeader));
  EXPECT_TRUE(shard->Admit(9).ok());
  DamageFile(data + "/shard/leader");
  EXPECT_THAT(Reopen(), StatusIs(absl::StatusCode::kDataLoss, ::testing::HasSubstr("shard/leader")));
}

TEST_F(ShardStoreTest, ComesBackAfterEveryStepAsIfNothingHadBeen) {
  Open();
  const std::vector<std::vector<float>> expected = Steps(0, 20);
  ASSERT_TRUE(*shard->Remove(kSession));
  for (uint64_t step = 0; step < 20; ++step) {
    Open();
    EXPECT_EQ(Step(step), expected[step]) << step;
    EXPECT_EQ(Step(step), expected[step]) << "again, " << step;
    store->snapshots().WaitIdle();
  }
  // Snapshots bound the log: of 20 steps it keeps those since the one before the newest.
  EXPECT_EQ(store->snapshots().List()->size(), 2u);
  EXPECT_EQ(store->snapshots().List()->back().step, 16u);
  EXPECT_LT(Files("/log/").size(), 8u);
}

TEST_F(ShardStoreTest, ASessionWithoutRoomStopsTheStartAndLosesNothing) {
  Open();
  const std::vector<std::vector<float>> expected = Steps(0, 10);
  ASSERT_TRUE(*shard->Remove(kSession));
  Open();
  for (uint64_t step = 0; step < 6; ++step) EXPECT_EQ(Step(step), expected[step]) << step;
  store->snapshots().WaitIdle();
  const int64_t capacity = std::exchange(options.capacity_bytes, shard->memory()->reserved() - 1);
  for (int start = 0; start < 2; ++start) {
    EXPECT_THAT(Reopen(),
                StatusIs(absl::StatusCode::kResourceExhausted, testing::HasSubstr("do not all fit: session \"job\"")));
  }
  options.capacity_bytes = capacity;
  Open();
  for (uint64_t step = 5; step < 10; ++step) EXPECT_EQ(Step(step), expected[step]) << step;
}

TEST_F(ShardStoreTest, ADamagedSnapshotIsReplacedByTheOneBefore) {
  Open();
  std::vector<float> expected;
  for (uint64_t step = 0; step < 14; ++step) {
    expected = Step(step);
    store->snapshots().WaitIdle();
  }
  const std::vector<std::string> files = Files("layer-000001");
  ASSERT_EQ(files.size(), 2u);
  DamageFile(files[1]);
  const SnapshotSummary newest = store->snapshots().List()->back();
  EXPECT_TRUE(absl::IsDataLoss(store->snapshots().Verify(kSession, newest.id).status()));
  Open();
  EXPECT_EQ(Step(13), expected);
}

TEST_F(ShardStoreTest, ASnapshotThatIsAskedForIsACutAtItsStep) {
  options.snapshot_interval_steps = 0;
  Open();
  for (uint64_t step = 0; step < 3; ++step) Step(step);
  const auto request = [this](uint64_t session_id, uint64_t step) {
    return shard->snapshots().Take({.session_id = session_id, .number = step, .step = step}).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(request(kSession, 2)));
  EXPECT_TRUE(absl::IsNotFound(request(kSession + 1, 5)));
  ASSERT_TRUE(request(kSession, 5).ok());
  for (uint64_t step = 3; step < 8; ++step) Step(step);
  store->snapshots().WaitIdle();
  const std::vector<SnapshotSummary> found = store->snapshots().List().value();
  ASSERT_EQ(found.size(), 1u);
  const SnapshotSummary verified = store->snapshots().Verify(kSession, found[0].id).value();
  EXPECT_EQ(verified.session, "job");
  EXPECT_EQ(verified.step, 5u);
  EXPECT_EQ(verified.layers, 2);
  EXPECT_GT(verified.bytes, 0u);
  EXPECT_TRUE(absl::IsNotFound(store->snapshots().Verify(kSession, found[0].id + 1).status()));
  EXPECT_TRUE(absl::IsNotFound(store->snapshots().Verify(kSession + 1, 1).status()));
}

// Notes how nice the thread is that writes large files.
class NicenessFileSystem final : public store::PosixFileSystem {
 public:
  absl::StatusOr<std::unique_ptr<store::WritableFile>> Create(const std::string& path) override {
    niceness = getpriority(PRIO_PROCESS, 0);
    return PosixFileSystem::Create(path);
  }
  std::atomic<int> niceness = -100;
};

TEST(ShardSnapshotsTest, TheWriterLeavesTheProcessorToSteps) {
  constexpr int kNicest = 19;
  const int own = getpriority(PRIO_PROCESS, 0);
  const TempDir dir;
  NicenessFileSystem fs;
  const RealClock clock;
  NullLogger logger;
  Observer observer;
  ShardSnapshots snapshots(fs, dir.path() + "/snapshots", clock, logger, observer);
  ASSERT_TRUE(snapshots.Open([](const SnapshotImages&) {}, [](const SnapshotImages&, uint64_t) {}).ok());
  InstallRecord install;
  install.install.session_id = 1;
  install.install.layers = {0};
  snapshots.Keep({.at = {.session_id = 1, .layer = 0, .step = 1}, .outcomes = {}, .state = "state"}, install, 1);
  snapshots.WaitIdle();
  EXPECT_EQ(fs.niceness, std::min(own + 10, kNicest));
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), own);
}

TEST_F(ShardStoreTest, TheCoordinatorsSnapshotsStayUntilItLetsThemGo) {
  Open();
  SnapshotOrder order{.session_id = kSession, .number = 1, .step = 3};
  EXPECT_FALSE(shard->TakeSnapshot(order)->begun);
  uint64_t step = 0;
  const auto run_to = [&](uint64_t end) {
    for (; step < end; ++step) {
      Step(step);
      store->snapshots().WaitIdle();
    }
  };
  run_to(3);
  order.repeated = true;
  EXPECT_FALSE(shard->TakeSnapshot(order)->begun) << "work on the step has yet to begin";
  run_to(5);  // and a regular one at 4
  const SnapshotProgress done = shard->TakeSnapshot(order).value();
  EXPECT_TRUE(done.begun && done.durable);
  run_to(17);
  std::vector<SnapshotSummary> found = store->snapshots().List().value();
  ASSERT_EQ(found.size(), 3u) << "besides the two newest";
  EXPECT_EQ(found[0].id, done.snapshot_id);
  EXPECT_EQ(found[0].step, 3u);
  EXPECT_EQ(found[0].number, 1u);
  // Another process knows it from the disk, and lets it be until it is told otherwise.
  Open();
  EXPECT_EQ(shard->TakeSnapshot(order)->snapshot_id, done.snapshot_id);
  run_to(21);
  EXPECT_EQ(store->snapshots().List()->front().number, 1u);
  ASSERT_TRUE(shard->TakeSnapshot({.session_id = kSession, .number = 2, .step = 22, .keep = {1}}).ok());
  run_to(25);
  EXPECT_EQ(store->snapshots().List()->front().number, 1u);
  ASSERT_TRUE(shard->TakeSnapshot({.session_id = kSession, .number = 3, .step = 26, .keep = {2}}).ok());
  run_to(33);
  std::vector<uint64_t> numbers;
  found = store->snapshots().List().value();
  numbers.reserve(found.size());
  for (const SnapshotSummary& one : found) numbers.push_back(one.number);
  EXPECT_EQ(numbers, (std::vector<uint64_t>{2, 3, 0, 0}));
}

TEST_F(ShardStoreTest, RestoredLayersGoOnBitwiseAlsoAfterARestart) {
  Open();
  for (uint64_t step = 0; step < 4; ++step) Step(step);
  const std::vector<float> expected = Step(4);  // its snapshot is as of an earlier step
  store->snapshots().WaitIdle();
  const auto stored = FindStoredSession(fs, {dir.path() + "/data"}, "job", 0);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->step, 4u);
  EXPECT_EQ(stored->spec, spec);
  EXPECT_TRUE(VerifyStoredSession(*stored).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckDirectoriesNotInUse(fs, *stored))) << "the shard runs";
  std::vector<LayerImage> images;
  for (const auto& [layer, file] : stored->layers) {
    images.push_back(DecodeImage(ReadLayer(file).value()).value());
    EXPECT_TRUE(absl::IsFailedPrecondition(shard->snapshots().RestoreLayer(images.back()))) << "the session is in use";
    EXPECT_TRUE(absl::IsFailedPrecondition(shard->snapshots().RestorableBytes(kSession, layer, {}).status()));
  }
  data = dir.path() + "/restored";  // another machine's disk
  ASSERT_TRUE(Reopen().ok());
  SessionInstall install = MakeInstall();
  const std::vector<Member> members = std::exchange(install.members, {});
  ASSERT_TRUE(shard->Install(install).ok());
  const SnapshotOrder order{.session_id = kSession, .number = 1, .step = 4, .restores = true};
  EXPECT_FALSE(shard->TakeSnapshot(order)->durable);
  LayerImage other = images[0];
  other.state[other.state.size() / 2] = static_cast<char>(other.state[other.state.size() / 2] ^ 1);
  EXPECT_FALSE(shard->snapshots().RestoreLayer(other).ok());
  other = images[0];
  other.at.layer = 7;
  EXPECT_EQ(GetErrorReason(shard->snapshots().RestoreLayer(other)), ErrorReason::kNotOwner);
  EXPECT_EQ(GetErrorReason(shard->snapshots().RestorableBytes(kSession, 7, {}).status()), ErrorReason::kNotOwner);
  EXPECT_GE(shard->snapshots().RestorableBytes(kSession, images[0].at.layer, {}).value(), images[0].state.size());
  for (const LayerImage& image : images) {
    const absl::Status restored = shard->snapshots().RestoreLayer(image);
    ASSERT_TRUE(restored.ok()) << restored;
  }
  store->snapshots().WaitIdle();
  EXPECT_TRUE(shard->TakeSnapshot(order)->durable);
  for (const bool restarted : {false, true}) {
    if (restarted) Open();
    install.members = members;
    ASSERT_TRUE(shard->Install(install).ok());
    EXPECT_EQ(Step(4), expected) << restarted;
  }
}

TEST(LayerUploadsTest, TakesPiecesInOrderAndChecksTheWhole) {
  LayerImage image{.at = {.session_id = 9, .layer = 3, .step = 1}, .outcomes = {}, .state = "state"};
  const std::string bytes = EncodeImageHead(image) + image.state;
  FakeClock clock;
  LayerUploads uploads(clock);
  const auto add = [&](const LayerPiece& piece) { return uploads.Add(piece, /*state_bytes=*/1000); };
  const auto piece = [&](uint64_t offset, uint64_t count) {
    return LayerPiece{.session_id = 9,
                      .step = 40,
                      .layer = 3,
                      .offset = offset,
                      .total_bytes = bytes.size(),
                      .checksum = store::Crc32c(bytes),
                      .data = absl::string_view(bytes).substr(offset, count)};
  };
  EXPECT_TRUE(absl::IsOutOfRange(add(piece(5, 5)).status())) << "not the first";
  EXPECT_FALSE(add(piece(0, 5))->has_value());
  EXPECT_TRUE(absl::IsOutOfRange(add(piece(6, 5)).status())) << "a gap";
  EXPECT_FALSE(add(piece(0, 7))->has_value()) << "begins anew";
  const auto whole = add(piece(7, bytes.size()));
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ((*whole)->state, "state");
  EXPECT_EQ((*whole)->at.step, 40u);
  LayerPiece bad = piece(0, bytes.size());
  ++bad.checksum;
  EXPECT_TRUE(absl::IsDataLoss(add(bad).status()));
  bad = piece(0, bytes.size());
  bad.total_bytes = 1001 + kMostImageHeadBytes;
  EXPECT_TRUE(absl::IsResourceExhausted(add(bad).status()));
  bad.total_bytes = 3;
  EXPECT_TRUE(absl::IsOutOfRange(add(bad).status())) << "more than the whole";
  for (uint64_t session = 0; session <= LayerUploads::kMaxLayers; ++session) {
    LayerPiece first = piece(0, 1);
    first.session_id = 9 + session;
    EXPECT_EQ(add(first).ok(), session < LayerUploads::kMaxLayers) << session;
    first.layer = 4;
    EXPECT_EQ(GetErrorReason(add(first).status()), ErrorReason::kCapacity) << "one of each session";
  }
  clock.Advance(LayerUploads::kIdle);
  EXPECT_TRUE(add(piece(0, 1)).ok()) << "the others have stopped";
  EXPECT_TRUE(add(piece(1, 1)).ok()) << "this one has not";
}

TEST_F(ShardStoreTest, AnOrderThatARestartForgotIsNotTakenUpAgain) {
  Open();
  SnapshotOrder order{.session_id = kSession, .number = 1, .step = 6};
  ASSERT_TRUE(shard->TakeSnapshot(order).ok());
  Step(0);
  Open();
  order.repeated = true;
  EXPECT_THAT(shard->TakeSnapshot(order), StatusIs(absl::StatusCode::kFailedPrecondition));
  order = {.session_id = kSession, .number = 2, .step = 0};
  EXPECT_TRUE(absl::IsInvalidArgument(shard->TakeSnapshot(order).status())) << "the step has begun";
  order.session_id = kSession + 1;
  EXPECT_TRUE(absl::IsNotFound(shard->TakeSnapshot(order).status()));
}

TEST_F(ShardStoreTest, AnOrderThatTheDiskRefusesIsGivenUp) {
  Open();
  Step(0);
  const SnapshotOrder order{.session_id = kSession, .number = 1, .step = 2};
  ASSERT_TRUE(shard->TakeSnapshot(order).ok());
  fs.set_full(true);
  for (uint64_t step = 1; step < 3; ++step) Step(step);
  store->snapshots().WaitIdle();
  EXPECT_TRUE(absl::IsAborted(shard->TakeSnapshot(order).status()));
  fs.set_full(false);
}

TEST_F(ShardStoreTest, ADiskThatFailsStopsNothingAndASnapshotHeals) {
  Open();
  for (uint64_t step = 0; step < 3; ++step) Step(step);
  fs.set_full(true);
  Step(3);
  store->log().Sync();
  Step(4);
  EXPECT_TRUE(store->log().stale(kSession));
  Step(5);  // a snapshot that cannot be written
  store->snapshots().WaitIdle();
  fs.set_full(false);
  ASSERT_TRUE(WaitUntil([&] { return store->log().writable(); }));
  for (uint64_t step = 6; step < 10; ++step) Step(step);
  store->snapshots().WaitIdle();
  EXPECT_FALSE(store->log().stale(kSession));
  const std::vector<float> expected = Step(10);
  Open();
  EXPECT_EQ(Step(10), expected);
}

TEST_F(ShardStoreTest, AStaleSessionIsGivenUpRatherThanBroughtBackWrong) {
  options.snapshot_interval_steps = 0;
  Open();
  Step(0);
  fs.set_full(true);
  Step(1);
  store->log().Sync();
  Step(2);
  fs.set_full(false);
  ASSERT_TRUE(WaitUntil([&] { return store->log().writable(); }));
  Step(3);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_TRUE(shard->ListSessions().empty());
  // Given up permanently: only a new install comes back.
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  const std::vector<float> expected = Step(0);
  Open();
  EXPECT_EQ(Step(0), expected);
}

// Four steps in second order, four in first, and so on: by a shard that stays, and by one that is lost before every
// step.
TEST_F(ShardStoreTest, FactorsStayInFirstOrderWheneverTheShardIsLost) {
  const auto run = [this](bool lose) {
    std::vector<std::vector<float>> answers;
    uint64_t updates = 0;
    for (uint64_t step = 0; step < 32; ++step) {
      if (lose || step == 0) Open();
      if (step % 8 >= 4) {
        FirstOrderStep(step);
      } else {
        answers.push_back(Step(step, ++updates));
      }
      store->snapshots().WaitIdle();
    }
    return answers;
  };
  std::vector<std::vector<float>> expected;
  for (const bool lose : {false, true}) {
    for (const uint64_t interval : {0, 3, 4, 5}) {
      SCOPED_TRACE(testing::Message() << "interval " << interval << " lose " << lose);
      options.snapshot_interval_steps = interval;
      data = absl::StrCat(dir.path(), "/", lose ? "lost" : "kept", interval);
      ASSERT_TRUE(Reopen().ok());
      const std::vector<std::vector<float>> answers = run(lose);
      if (expected.empty()) expected = answers;
      EXPECT_EQ(answers, expected);
    }
  }
}

TEST_F(ShardStoreTest, AClosedSessionLeavesNothingBehind) {
  Open();
  for (uint64_t step = 0; step < 9; ++step) Step(step);
  store->snapshots().WaitIdle();
  EXPECT_FALSE(Files("/snapshots/").empty());
  ASSERT_TRUE(*shard->Remove(kSession));
  store->snapshots().WaitIdle();
  EXPECT_TRUE(Files("/snapshots/").empty());
  ASSERT_TRUE(Reopen().ok());
  EXPECT_TRUE(shard->ListSessions().empty());
}

TEST_F(ShardStoreTest, ASessionWhoseSnapshotsFoundNoFolderEnds) {
  Open();
  Step(0);
  std::filesystem::remove_all(data + "/shard/snapshots");
  { std::ofstream(data + "/shard/snapshots") << "no folder"; }
  for (uint64_t step = 1; step < 9; ++step) Step(step);
  store->snapshots().WaitIdle();
  ASSERT_TRUE(*shard->Remove(kSession));
  store->snapshots().WaitIdle();
  EXPECT_TRUE(shard->ListSessions().empty());
}

TEST_F(ShardStoreTest, ADataFolderThatWasRemovedIsNoneToComeBackFrom) {
  Open();
  for (uint64_t step = 0; step < 3; ++step) Step(step);
  EXPECT_TRUE(store->HoldsAllOf(kSession));
  std::filesystem::remove_all(data);
  Step(3);
  store->log().Sync();
  EXPECT_FALSE(store->HoldsAllOf(kSession));
}

TEST_F(ShardStoreTest, ALogThatBeganAnewKeepsWhatItsSnapshotNeeds) {
  options.snapshot_interval_steps = 40;
  Open();
  for (uint64_t step = 0; step < 50; ++step) Step(step);
  store->snapshots().WaitIdle();
  std::filesystem::remove_all(data + "/shard/log");
  Step(50);
  store->log().Sync();
  EXPECT_TRUE(store->log().stale(kSession));
  ASSERT_TRUE(WaitUntil([&] { return store->log().writable(); }));
  for (uint64_t step = 51; step < 110; ++step) Step(step);  // with a snapshot at 80
  store->snapshots().WaitIdle();
  EXPECT_TRUE(store->HoldsAllOf(kSession));
  store->log().Forget(kSession + 1);  // another session's end removes what no session needs
  const std::vector<float> expected = Step(110);
  Open();
  EXPECT_EQ(Step(110), expected);
}

// Calls back when the first layer of a snapshot is read.
struct ReadingFileSystem final : store::PosixFileSystem {
  absl::StatusOr<std::string> ReadFile(const std::string& path) override {
    absl::StatusOr<std::string> bytes = PosixFileSystem::ReadFile(path);
    if (absl::StrContains(path, "layer-000000")) on_read();
    return bytes;
  }
  std::function<void()> on_read = [] {};
};

TEST_F(ShardStoreTest, ASessionMayBeClosedWhileItsSnapshotIsVerified) {
  ReadingFileSystem files;
  ASSERT_TRUE(StoredShardFixture::Reopen(files, real_clock).ok());
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  for (uint64_t step = 0; step < 6; ++step) Step(step);
  store->snapshots().WaitIdle();
  const SnapshotSummary newest = store->snapshots().List()->back();
  files.on_read = [&] {
    EXPECT_TRUE(shard->Remove(kSession).value());
    store->snapshots().WaitIdle();
  };
  EXPECT_FALSE(store->snapshots().Verify(kSession, newest.id).ok());
  EXPECT_TRUE(store->snapshots().List()->empty());
  EXPECT_TRUE(Files("layer-000000").empty());
  EndProcess();
}

TEST_F(ShardStoreTest, WhatLayersStillWriteAfterTheRemovalStaysNowhere) {
  Open();
  Step(0);
  EXPECT_TRUE(shard->Remove(kSession).value());
  const LayerStep at = {.session_id = kSession, .layer = 0, .step = 1};
  store->AppendGradient({.at = at});
  EXPECT_EQ(store->gradients().Read(kSession, [](const store::Record&) { return absl::OkStatus(); }).value(), 0u)
      << "not known";
}

TEST_F(ShardStoreTest, DamageInTheLogIsAnErrorThatNamesTheFile) {
  options.snapshot_interval_steps = 0;
  Open();
  for (uint64_t step = 0; step < 12; ++step) Step(step);
  store->log().Sync();
  const std::vector<std::string> segments = Files(".log");
  ASSERT_GT(segments.size(), 2u);
  DamageFile(segments[0]);
  EXPECT_THAT(Reopen(), StatusIs(absl::StatusCode::kDataLoss, testing::HasSubstr(segments[0])));
}

}  // namespace
}  // namespace precondor::recovery
