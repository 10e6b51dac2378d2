// SPDX-License-Identifier: Apache-2.0
// A coordinator that comes back without its journal: its shards keep what they have until an operator says. Real
// servers, clients and precondorctl.
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_commands.h"
#include "precondor/client.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 6, kCols = 5;
constexpr size_t kLayers = 6;
constexpr size_t kElements = kRows * kCols;

class QuarantineLoopbackTest : public ::testing::Test {
 protected:
  QuarantineLoopbackTest() {
    for (int s = 0; s < 2; ++s) shards_.push_back(StartShard(s, "127.0.0.1:0"));
    StartCoordinator();
    spec_.name = "job";
    spec_.statistics = StatisticsKind::kPerWorkerMean;
    spec_.inv_freq = 1;
    spec_.method.options["rank"] = 4.0;
    for (size_t i = 0; i < kLayers; ++i) spec_.layers.push_back({absl::StrCat("layer", i), kRows, kCols, false});
  }

  std::unique_ptr<RawServer> StartShard(int shard, const std::string& listen) {
    ServerConfig config;
    config.role = ServerRole::kShard;
    config.listen = {listen};
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
    for (const auto& shard : shards_) config.shards.push_back(absl::StrCat("127.0.0.1:", shard->app().port()));
    coordinator_ = std::make_unique<RawServer>(config);
  }
  // With the journal in another directory, or with one that is empty.
  void RestartCoordinator(const std::string& journal) {
    coordinator_.reset();
    journal_ = journal;
    StartCoordinator();
  }
  // And the coordinator, with its journal.
  void RestartShards() {
    coordinator_.reset();
    for (int s = 0; s < 2; ++s) {
      const std::string listen = shards_[s]->app().addresses().front();
      shards_[s].reset();
      shards_[s] = StartShard(s, listen);
    }
    StartCoordinator();
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", coordinator_->app().port()); }
  absl::StatusOr<std::string> Ctl(std::vector<std::string> arguments) const {
    arguments.push_back("--server=" + address());
    const auto options = ParseCtlOptions(arguments);
    if (!options.ok()) return options.status();
    const auto output = RunCtlCommand(*options);
    if (!output.ok()) return output.status();
    return output->text;
  }
  nlohmann::json Quarantined() const {
    const auto text = Ctl({"session", "quarantined", "--json"});
    EXPECT_TRUE(text.ok()) << text.status();
    return text.ok() ? nlohmann::json::parse(*text)["quarantined"] : nlohmann::json::array();
  }
  // All of the job's layers.
  bool AwaitQuarantine() const {
    return WaitUntil([&] {
      const nlohmann::json listed = Quarantined();
      return !listed.empty() && listed[0]["layers_found"] == kLayers;
    });
  }

  std::unique_ptr<Worker> Join(uint64_t first_step) {
    ClientOptions options;
    options.coordinator = address();
    client_ = Client::Connect(options).value();
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
    const auto told = worker.ReportStep(step, 1.0, 1, true, 0.1);
    EXPECT_TRUE(told.ok()) << told.status();
    return answers;
  }
  std::vector<std::vector<float>> Train(uint64_t from, uint64_t to) {
    const std::unique_ptr<Worker> worker = Join(from);
    std::vector<std::vector<float>> answers;
    for (uint64_t step = from; step < to; ++step) answers.push_back(Step(*worker, step));
    return answers;
  }
  // Of a job that nothing happens to.
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

TEST_F(QuarantineLoopbackTest, AJobGoesOnThatTheCoordinatorAdopts) {
  const std::vector<std::vector<float>> expected = Expected(7, 12);
  Train(0, 7);
  coordinator_.reset();
  std::filesystem::remove_all(dir_.path() + "/coordinator-first");
  StartCoordinator();
  ASSERT_TRUE(AwaitQuarantine());
  EXPECT_EQ(Reserved(), 0);
  const nlohmann::json listed = Quarantined();
  ASSERT_EQ(listed.size(), 1u) << listed;
  EXPECT_EQ(listed[0]["name"], "job");
  EXPECT_EQ(listed[0]["last_step"], 6);
  EXPECT_EQ(listed[0]["shards"].size(), 2u);
  EXPECT_THAT(Ctl({"session", "quarantined"}).value(), HasSubstr("6/6"));
  EXPECT_EQ(Ctl({"session", "adopt", "other"}).status().code(), absl::StatusCode::kNotFound);
  const auto adopted = Ctl({"session", "adopt", "job"});
  ASSERT_TRUE(adopted.ok()) << adopted.status();
  EXPECT_TRUE(Quarantined().empty());
  EXPECT_EQ(Ctl({"session", "adopt", "job"}).status().code(), absl::StatusCode::kFailedPrecondition) << "it is open";
  EXPECT_EQ(Train(7, 12), expected);
  // The journal has it from now on.
  RestartCoordinator(journal_);
  EXPECT_THAT(Ctl({"sessions"}).value(), HasSubstr("job"));
}

TEST_F(QuarantineLoopbackTest, StaysThereWhileShardsAreRestartedUntilItIsDeleted) {
  Train(0, 5);
  RestartCoordinator("-empty");
  ASSERT_TRUE(AwaitQuarantine());
  RestartShards();
  ASSERT_TRUE(AwaitQuarantine());
  EXPECT_EQ(Reserved(), 0);
  const auto deleted = Ctl({"session", "delete-quarantined", "job"});
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_TRUE(Quarantined().empty());
  EXPECT_EQ(Ctl({"session", "adopt", "job"}).status().code(), absl::StatusCode::kNotFound);
}

// Nothing has to be adopted: the journal knows the session.
TEST_F(QuarantineLoopbackTest, AWrongPathDoesNoHarm) {
  const std::vector<std::vector<float>> expected = Expected(4, 8);
  Train(0, 4);
  RestartCoordinator("-wrong-path");
  ASSERT_TRUE(AwaitQuarantine());
  RestartCoordinator("-first");
  EXPECT_TRUE(WaitUntil([&] { return Quarantined().empty(); }));
  EXPECT_EQ(Train(4, 8), expected);
}

TEST_F(QuarantineLoopbackTest, AJobOfTheSameNameBeginsAnewBesideIt) {
  const std::vector<std::vector<float>> expected = Expected(3, 8);
  Train(0, 3);
  RestartCoordinator("-empty");
  Train(0, 2);
  ASSERT_TRUE(AwaitQuarantine());
  EXPECT_THAT(std::string(Ctl({"session", "adopt", "job"}).status().message()), HasSubstr("close it before"));
  ASSERT_TRUE(*client_->CloseSession("job"));
  const auto adopted = Ctl({"session", "adopt", "job"});
  ASSERT_TRUE(adopted.ok()) << adopted.status();
  RestartShards();
  EXPECT_EQ(Train(3, 8), expected);
  EXPECT_TRUE(Quarantined().empty());
}

TEST_F(QuarantineLoopbackTest, WhatIsClosedIsRemoved) {
  Train(0, 3);
  ASSERT_TRUE(*client_->CloseSession("job"));
  RestartCoordinator("-empty");
  Train(0, 1);  // by then the coordinator has looked at its shards
  EXPECT_TRUE(Quarantined().empty());
}

}  // namespace
}  // namespace precondor
