// SPDX-License-Identifier: Apache-2.0
// Snapshots of a whole session over TCP: several shards, one cut.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include <nlohmann/json.hpp>

#include "client/cpp/tools/ctl_commands.h"
#include "precondor/client.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 6, kCols = 5;
constexpr size_t kLayers = 6;
constexpr size_t kElements = kRows * kCols;
constexpr float kRate = 0.05f;

using Weights = std::vector<std::vector<float>>;  // by layer

// A coordinator and its shards, all with data directories.
class Cluster {
 public:
  Cluster(const std::string& dir, int shards) : dir_(dir) {
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 10;
    coordinator.lease_steps = 4;
    coordinator.data_dir = absl::StrCat(dir, "/coordinator");
    for (int s = 0; s < shards; ++s) {
      ServerConfig shard;
      shard.role = ServerRole::kShard;
      shard.data_dir = ShardDir(s);
      shards_.push_back(std::make_unique<RawServer>(shard));
      coordinator.shards.push_back(shards_.back()->address());
    }
    server_ = std::make_unique<RawServer>(coordinator);
  }
  std::string ShardDir(int shard) const { return absl::StrCat(dir_, "/shard", shard); }
  std::string address() const { return server_->address(); }
  absl::StatusOr<std::string> Ctl(const std::vector<std::string>& arguments) const {
    return precondor::Ctl(address(), arguments);
  }
  nlohmann::json List() const {
    const auto text = Ctl({"snapshot", "list", "--json"});
    EXPECT_TRUE(text.ok()) << text.status();
    return text.ok() ? nlohmann::json::parse(*text) : nlohmann::json();
  }

 private:
  const std::string dir_;
  std::vector<std::unique_ptr<RawServer>> shards_;
  std::unique_ptr<RawServer> server_;
};

SessionSpec MakeSpec(int32_t ranks = 1) {
  SessionSpec spec;
  spec.name = "job";
  spec.world_size = ranks;
  spec.statistics = StatisticsKind::kMean;
  spec.inv_freq = 2;
  spec.method.options["rank"] = 4.0;
  for (size_t i = 0; i < kLayers; ++i) spec.layers.push_back({absl::StrCat("layer", i), kRows, kCols, false});
  return spec;
}

// A job that trains: weights follow what the service answers. All ranks have the same statistics and gradients, so that
// any number of them has the same weights.
class Trainer {
 public:
  Trainer(const Cluster& cluster, uint64_t first_step, Weights begin, int32_t ranks = 1)
      : weights(std::move(begin)), next(first_step) {
    client_ = ConnectTo(cluster.address());
    const auto opened = client_->OpenSession(MakeSpec(ranks));
    EXPECT_TRUE(opened.ok()) << opened.status();
    workers_ = JoinAll(*client_, MakeSpec(ranks), static_cast<uint64_t>(absl::GetCurrentTimeNanos()), first_step);
  }
  static Weights Begin() { return Weights(kLayers, std::vector<float>(kElements, 1.0f)); }

  absl::Status Step() {
    std::vector<Weights> answers(workers_.size(), Weights(kLayers, std::vector<float>(kElements)));
    std::vector<PreconditionFuture> futures;
    absl::Status done;
    for (size_t rank = 0; rank < workers_.size(); ++rank) done.Update(Send(*workers_[rank], answers[rank], futures));
    for (const PreconditionFuture& future : futures) done.Update(future.Wait().status());
    if (!done.ok()) return done;
    std::vector<ReportFuture> reports;
    for (size_t rank = 0; rank < workers_.size(); ++rank) {
      EXPECT_EQ(answers[rank], answers[0]) << "rank " << rank;
      reports.push_back(workers_[rank]->ReportStep(next, 1.0, 1, true, 0.1));
    }
    for (const ReportFuture& report : reports) {
      const auto told = report.Wait();
      if (!told.ok()) return told.status();
      directive = *told;
    }
    for (size_t layer = 0; layer < kLayers; ++layer) {
      for (size_t i = 0; i < kElements; ++i) weights[layer][i] -= kRate * answers[0][layer][i];
    }
    ++next;
    // As a trainer would: its checkpoint goes with the service's snapshot.
    if (directive.snapshot_at == next) checkpoint = weights;
    return absl::OkStatus();
  }
  void RunTo(uint64_t end) {
    while (next < end) {
      const absl::Status done = Step();
      ASSERT_TRUE(done.ok()) << "step " << next << ": " << done;
    }
  }

  Weights weights;
  uint64_t next;
  StepDirective directive;
  Weights checkpoint;

 private:
  // A rank's part of the step. `answers`: its gradients, and where their answers come.
  absl::Status Send(Worker& worker, Weights& answers, std::vector<PreconditionFuture>& futures) const {
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const auto index = static_cast<int64_t>(layer);
      if (worker.NeedsStatistics(next, index)) {
        const std::vector<float> a(kCols, weights[layer][0] + 0.1f * static_cast<float>(next % 7));
        const std::vector<float> g(kRows, weights[layer][1] + 0.2f * static_cast<float>(layer));
        const absl::Status sent = worker.SendStatistics(next, index, ConstMatrixView(a.data(), 1, kCols),
                                                        ConstMatrixView(g.data(), 1, kRows), 1);
        if (!sent.ok()) return sent;
      }
      for (size_t i = 0; i < kElements; ++i) {
        answers[layer][i] = weights[layer][i] * std::sin(static_cast<float>(next * 7 + layer * 3 + i + 1));
      }
      const MatrixView view(answers[layer].data(), kRows, kCols);
      futures.push_back(worker.Precondition(next, index, {view, view}, 1));
    }
    return absl::OkStatus();
  }

  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

// Waits until the last one is what it becomes in the end.
nlohmann::json AwaitLast(const Cluster& cluster) {
  nlohmann::json last;
  EXPECT_TRUE(WaitUntil([&] {
    const nlohmann::json listed = cluster.List()["session_snapshots"];
    if (!listed.empty()) last = listed.back();
    return !listed.empty() && last["state"] != "under_way";
  })) << last;
  return last;
}

TEST(SnapshotTest, IsOneCutThroughAllShardsThatTheTrainerHearsOf) {
  const TempDir dir;
  const Cluster cluster(dir.path(), 2);
  Trainer trainer(cluster, 0, Trainer::Begin());
  trainer.RunTo(3);
  const auto text = cluster.Ctl({"snapshot", "create", "job", "--json"});
  ASSERT_TRUE(text.ok()) << text.status();
  const uint64_t step = nlohmann::json::parse(*text)["step"];
  EXPECT_GT(step, trainer.directive.lease_through_step);
  trainer.RunTo(step);
  EXPECT_EQ(trainer.directive.snapshot_at, step);
  EXPECT_EQ(trainer.directive.snapshot_id, 1u);
  EXPECT_EQ(trainer.checkpoint, trainer.weights);
  EXPECT_EQ(cluster.List()["session_snapshots"][0]["state"], "under_way");
  trainer.RunTo(step + 2);
  const nlohmann::json last = AwaitLast(cluster);
  EXPECT_EQ(last["state"], "complete") << last;
  EXPECT_EQ(last["step"], step);
  ASSERT_EQ(last["shards"].size(), 2u);
  std::vector<uint32_t> layers;
  for (const auto& shard : last["shards"]) {
    for (const uint32_t layer : shard["layers"]) layers.push_back(layer);
  }
  EXPECT_THAT(layers, ::testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5));
  const auto listed = cluster.List();
  for (const auto& part : listed["snapshots"]) EXPECT_EQ(part["step"], step);
  const auto verified = cluster.Ctl({"snapshot", "verify", "job"});
  ASSERT_TRUE(verified.ok()) << verified.status();
  EXPECT_THAT(*verified, HasSubstr("whole"));
}

// A job on two shards that took a snapshot and went on.
struct Original {
  explicit Original(const std::string& dir) : cluster(dir, 2), trainer(cluster, 0, Trainer::Begin()) {
    trainer.RunTo(20);
    const auto text = cluster.Ctl({"snapshot", "create", "job", "--json"});
    EXPECT_TRUE(text.ok()) << text.status();
    if (text.ok()) step = nlohmann::json::parse(*text)["step"];
    trainer.RunTo(step + 2);
    EXPECT_EQ(AwaitLast(cluster)["state"], "complete");
    trainer.RunTo(step + 10);
  }
  Cluster cluster;
  Trainer trainer;
  uint64_t step = 0;
};

std::vector<std::string> RestoreFrom(const std::string& dir) {
  return {"snapshot", "restore", "job", "--snapshot-path", dir + "/shard0", "--snapshot-path", dir + "/shard1"};
}

TEST(RestoreTest, GoesOnBitwiseOnAnyNumberOfShardsAndRanks) {
  const TempDir dir;
  std::filesystem::create_directory(dir.path() + "/two");
  Weights expected, checkpoint;
  uint64_t step = 0;
  {
    Original original(dir.path() + "/two");
    expected = original.trainer.weights;
    checkpoint = original.trainer.checkpoint;
    step = original.step;
  }
  for (const auto& [shards, ranks] : {std::pair(1, 1), {2, 1}, {3, 2}}) {
    const std::string place = absl::StrCat(dir.path(), "/", shards);
    std::filesystem::create_directory(place);
    const Cluster cluster(place, shards);
    auto restore = RestoreFrom(dir.path() + "/two");
    restore.push_back(absl::StrCat("--world-size=", ranks));
    const auto restored = cluster.Ctl(restore);
    ASSERT_TRUE(restored.ok()) << restored.status();
    EXPECT_THAT(*restored, HasSubstr(absl::StrCat("begins with step ", step)));
    Trainer trainer(cluster, step, checkpoint, ranks);
    ASSERT_NO_FATAL_FAILURE(trainer.RunTo(step + 10));
    EXPECT_EQ(trainer.weights, expected) << shards << " shards, " << ranks << " ranks";
  }
  // With factors of its own a job comes to other weights.
  std::filesystem::create_directory(dir.path() + "/fresh");
  const Cluster fresh(dir.path() + "/fresh", 2);
  Trainer trainer(fresh, step, checkpoint);
  ASSERT_NO_FATAL_FAILURE(trainer.RunTo(step + 10));
  EXPECT_NE(trainer.weights, expected);
}

TEST(RestoreTest, TakesTheJobBackOnTheShardsThatItRunsOn) {
  const TempDir dir, copy;
  Original original(dir.path());
  const auto here = RestoreFrom(dir.path());
  EXPECT_THAT(original.cluster.Ctl(here), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("there is one")));
  auto replace = here;
  replace.push_back("--replace");
  EXPECT_THAT(original.cluster.Ctl(replace), MessageIs(HasSubstr("copy it first")));
  ASSERT_TRUE(original.trainer.Step().ok()) << "nothing has been touched";
  const Weights expected = original.trainer.weights;
  const uint64_t end = original.trainer.next;
  std::filesystem::copy(dir.path(), copy.path(), std::filesystem::copy_options::recursive);
  replace = RestoreFrom(copy.path());
  replace.push_back("--replace");
  const auto restored = original.cluster.Ctl(replace);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_FALSE(original.trainer.Step().ok()) << "the earlier workers are out";
  Trainer trainer(original.cluster, original.step, original.trainer.checkpoint);
  ASSERT_NO_FATAL_FAILURE(trainer.RunTo(end));
  EXPECT_EQ(trainer.weights, expected);
}

TEST(RestoreTest, ADamagedFileIsFoundBeforeAnythingIsTouched) {
  const TempDir dir, copy;
  Original original(dir.path());
  std::filesystem::copy(dir.path(), copy.path(), std::filesystem::copy_options::recursive);
  std::string damaged;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(copy.path() + "/shard1")) {
    if (entry.path().extension() == ".snap") damaged = entry.path().string();
  }
  ASSERT_FALSE(damaged.empty());
  std::fstream file(damaged, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(std::filesystem::file_size(damaged)) - 9);
  file.put('!');
  file.close();
  auto replace = RestoreFrom(copy.path());
  replace.push_back("--replace");
  EXPECT_THAT(original.cluster.Ctl(replace), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(damaged)));
  EXPECT_TRUE(original.trainer.Step().ok());
  // Nor is half a snapshot one.
  const absl::Status half =
      original.cluster.Ctl({"snapshot", "restore", "job", "--snapshot-path", copy.path() + "/shard0"}).status();
  EXPECT_TRUE(absl::IsNotFound(half)) << half;
  EXPECT_THAT(std::string(half.message()), HasSubstr("3 of 6 layers"));
}

TEST(SnapshotTest, WithoutADataDirectoryItIsRefused) {
  ServerConfig config;
  config.role = ServerRole::kAll;
  RawServer server(config);
  ClientOptions options;
  options.coordinator = server.address();
  const auto client = Client::Connect(options);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->OpenSession(MakeSpec()).ok());
  const auto parsed = ParseCtlOptions({"snapshot", "create", "job", "--server=" + options.coordinator});
  ASSERT_TRUE(parsed.ok());
  EXPECT_THAT(RunCtlCommand(*parsed), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no data directory")));
}

}  // namespace
}  // namespace precondor
