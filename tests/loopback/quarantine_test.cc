// SPDX-License-Identifier: Apache-2.0
// A coordinator that comes back without its journal: its shards keep what they have. Real servers, clients and
// precondorctl.
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include <nlohmann/json.hpp>

#include "precondor/client.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

constexpr int64_t kRows = 6, kCols = 5;
constexpr size_t kLayers = 6;
constexpr size_t kElements = kRows * kCols;

class QuarantineLoopbackTest : public ::testing::Test {
 protected:
  QuarantineLoopbackTest() {
    for (int s = 0; s < 2; ++s) shards_.push_back(StartShard(s));
    StartCoordinator();
    spec_.name = "job";
    spec_.statistics = StatisticsKind::kPerWorkerMean;
    spec_.inv_freq = 1;
    spec_.method.options["rank"] = 4.0;
    for (size_t i = 0; i < kLayers; ++i) spec_.layers.push_back({absl::StrCat("layer", i), kRows, kCols, false});
  }

  std::unique_ptr<RawServer> StartShard(int shard) {
    ServerConfig config;
    config.role = ServerRole::kShard;
    config.data_dir = absl::StrCat(dir_.path(), "/shard", shard);
    config.snapshot_interval_steps = 3;
    return std::make_unique<RawServer>(config);
  }
  void StartCoordinator() {
    ServerConfig config;
    config.role = ServerRole::kCoordinator;
    config.reconcile_interval_ms = 10;
    config.lease_steps = 4;
    config.data_dir = absl::StrCat(dir_.path(), "/coordinator", journal_);
    for (const auto& shard : shards_) config.shards.push_back(shard->address());
    coordinator_ = std::make_unique<RawServer>(config);
  }
  // With the journal in another directory, or with one that is empty.
  void RestartCoordinator(const std::string& journal) {
    coordinator_.reset();
    journal_ = journal;
    StartCoordinator();
  }
  std::string address() const { return coordinator_->address(); }
  absl::StatusOr<std::string> Ctl(const std::vector<std::string>& arguments) const {
    return precondor::Ctl(address(), arguments);
  }
  // The sessions that a shard keeps in quarantine, or needs to go on from there.
  int64_t Kept(int shard) const {
    int64_t kept = 0;
    for (const auto& entry :
         std::filesystem::directory_iterator(absl::StrCat(dir_.path(), "/shard", shard, "/shard/quarantine"))) {
      kept += std::filesystem::exists(entry.path() / "STATE") ? 1 : 0;
    }
    return kept;
  }
  bool AwaitQuarantine() const {
    return WaitUntil([&] { return Kept(0) == 1 && Kept(1) == 1; });
  }

  std::unique_ptr<Worker> Join(uint64_t first_step) {
    client_ = ConnectTo(address());
    EXPECT_TRUE(client_->OpenSession(spec_).ok());
    auto joined = client_->Join(
        "job",
        {.rank = 0, .incarnation = static_cast<uint64_t>(absl::GetCurrentTimeNanos()), .first_step = first_step});
    EXPECT_TRUE(joined.ok()) << joined.status();
    return *std::move(joined);
  }
  // Answers of all layers.
  static std::vector<float> Step(Worker& worker, uint64_t step) {
    std::vector<float> answers(kLayers * kElements);
    std::vector<PreconditionFuture> futures;
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const auto index = static_cast<int64_t>(layer);
      const std::vector<float> a(kCols, 0.5f + 0.1f * static_cast<float>(step % 7));
      const std::vector<float> g(kRows, 0.25f + 0.2f * static_cast<float>(layer));
      EXPECT_TRUE(
          worker
              .SendStatistics(step, index, ConstMatrixView(a.data(), 1, kCols), ConstMatrixView(g.data(), 1, kRows), 1)
              .ok());
      float* const out = answers.data() + layer * kElements;
      for (size_t i = 0; i < kElements; ++i) out[i] = std::sin(static_cast<float>(step * 7 + layer * 3 + i + 1));
      const MatrixView view(out, kRows, kCols);
      futures.push_back(worker.Precondition(step, index, {view, view}, 1));
    }
    for (PreconditionFuture& future : futures) {
      const auto outcome = future.Wait();
      EXPECT_TRUE(outcome.ok()) << "step " << step << ": " << outcome.status();
    }
    const auto told = worker.ReportStep(step, 1.0, 1, true, 0.1).Wait();
    EXPECT_TRUE(told.ok()) << told.status();
    return answers;
  }
  std::vector<std::vector<float>> Train(uint64_t from, uint64_t to) {
    const std::unique_ptr<Worker> worker = Join(from);
    std::vector<std::vector<float>> answers;
    for (uint64_t step = from; step < to; ++step) answers.push_back(Step(*worker, step));
    return answers;
  }
  // The answers to a job that nothing happens to.
  std::vector<std::vector<float>> Expected(uint64_t from, uint64_t to) {
    const std::vector<std::vector<float>> all = Train(0, to);
    EXPECT_TRUE(*client_->CloseSession("job"));
    return {all.begin() + static_cast<std::ptrdiff_t>(from), all.end()};
  }
  int64_t Reserved() const {
    const auto status = nlohmann::json::parse(Ctl({"status", "--json"}).value());
    int64_t reserved = 0;
    for (const auto& server : status["servers"]) reserved += server["reserved_bytes"].get<int64_t>();
    return reserved;
  }

  TempDir dir_;
  std::string journal_ = "-first";
  std::vector<std::unique_ptr<RawServer>> shards_;
  std::unique_ptr<RawServer> coordinator_;
  std::unique_ptr<Client> client_;
  SessionSpec spec_;
};

TEST_F(QuarantineLoopbackTest, SnapshotRestoreReadsWhatShardsKeepOfALostJournal) {
  const std::vector<std::vector<float>> expected = Expected(0, 14);
  Train(0, 4);
  ASSERT_TRUE(Ctl({"snapshot", "create", "job"}).ok());
  Train(4, 12);
  nlohmann::json snapshot;
  ASSERT_TRUE(WaitUntil([&] {
    snapshot = nlohmann::json::parse(Ctl({"snapshot", "list", "job", "--json"}).value())["session_snapshots"][0];
    return snapshot["state"] == "complete";
  })) << snapshot;
  coordinator_.reset();
  std::filesystem::remove_all(dir_.path() + "/coordinator-first");
  StartCoordinator();
  ASSERT_TRUE(AwaitQuarantine());
  EXPECT_EQ(Reserved(), 0);
  EXPECT_EQ(Ctl({"layers", "job"}).status().code(), absl::StatusCode::kNotFound);
  const auto restored = Ctl({"snapshot", "restore", "job", absl::StrCat("--snapshot-path=", dir_.path(), "/shard0"),
                             absl::StrCat("--snapshot-path=", dir_.path(), "/shard1"),
                             absl::StrCat("--snapshot=", snapshot["snapshot_id"].get<uint64_t>()), "--json"});
  ASSERT_TRUE(restored.ok()) << restored.status();
  const auto step = nlohmann::json::parse(*restored)["step"].get<uint64_t>();
  EXPECT_EQ(step, snapshot["step"]);
  EXPECT_EQ(Train(step, 14), std::vector(expected.begin() + static_cast<std::ptrdiff_t>(step), expected.end()));
  EXPECT_TRUE(Kept(0) == 1 && Kept(1) == 1) << "the lost session stays until its time is over";
}

// The session comes back without an operator: the journal knows it.
TEST_F(QuarantineLoopbackTest, AWrongPathDoesNoHarm) {
  const std::vector<std::vector<float>> expected = Expected(4, 8);
  Train(0, 4);
  RestartCoordinator("-wrong-path");
  ASSERT_TRUE(AwaitQuarantine());
  RestartCoordinator("-first");
  EXPECT_TRUE(WaitUntil([&] { return Reserved() > 0; }));
  EXPECT_EQ(Train(4, 8), expected);
}

}  // namespace
}  // namespace precondor
