// SPDX-License-Identifier: Apache-2.0
// One of three shards loses its memory, or a session of it, and the job goes on: real servers and clients over TCP.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"
#include "precondor/v1/shard.grpc.pb.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

constexpr int64_t kRows = 6, kCols = 5;
constexpr int32_t kWorkers = 3;
constexpr size_t kLayers = 6;
constexpr size_t kElements = kRows * kCols;
constexpr float kRate = 0.01f;

using Weights = std::vector<std::vector<float>>;  // by layer

// Weights that follow what the service answers, on every rank.
class Job {
 public:
  explicit Job(ExchangeMode exchange, bool keeps_logs = true) : logs(keeps_logs) {
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 20;
    coordinator.shard_timeout_ms = 500;
    for (int s = 0; s < 3; ++s) {
      shards.push_back(std::make_unique<RawServer>(ShardConfig()));
      coordinator.shards.push_back(shards.back()->address());
    }
    server = std::make_unique<RawServer>(coordinator);
    spec.name = "job";
    spec.world_size = kWorkers;
    spec.exchange = exchange;
    spec.statistics = StatisticsKind::kPerWorkerMean;
    spec.inv_freq = 4;
    spec.warmup_steps = 0;
    spec.method.options["rank"] = 4.0;
    for (size_t i = 0; i < kLayers; ++i) spec.layers.push_back({absl::StrCat("layer", i), kRows, kCols, false});
    weights.assign(kWorkers, Weights(kLayers, std::vector<float>(kElements, 1.0f)));
    decisions.assign(kLayers, {});
  }

  void Join(uint64_t incarnation = 1, uint64_t first_step = 0) {
    workers.clear();
    client = ConnectTo(server->address());
    ASSERT_TRUE(client->OpenSession(spec).ok());
    workers = JoinAll(*client, spec, incarnation, first_step);
  }

  // The gradient of a rank's data at these weights.
  std::vector<float> Gradient(const std::vector<float>& at, uint64_t step, size_t layer, uint32_t rank) const {
    std::vector<float> out(kElements);
    for (size_t i = 0; i < kElements; ++i) {
      out[i] = at[i] * std::sin(static_cast<float>(step * 7 + layer * 3 + i + 1)) + 0.1f * static_cast<float>(rank);
    }
    return out;
  }
  std::vector<float> ToSend(uint64_t step, size_t layer, uint32_t rank) const {
    if (spec.exchange == ExchangeMode::kDirect) return Gradient(weights[rank][layer], step, layer, rank);
    std::vector<float> sum(kElements);
    for (uint32_t other = 0; other < kWorkers; ++other) {
      const std::vector<float> part = Gradient(weights[rank][layer], step, layer, other);
      for (size_t i = 0; i < kElements; ++i) sum[i] += part[i] / kWorkers;
    }
    return sum;
  }

  // The rank's part of a step in these layers: in DIRECT with the new weights, in DELEGATE up to the broadcast. `sent`
  // is called when it has sent all.
  absl::Status Work(uint32_t rank, uint64_t step, const std::vector<size_t>& layers,
                    const std::function<void()>& sent = nullptr) {
    Worker& worker = *workers[rank];
    std::vector<std::vector<float>> answers(kLayers);
    std::vector<PreconditionFuture> futures(kLayers);
    for (const size_t layer : layers) {
      const int64_t index = static_cast<int64_t>(layer);
      if (worker.NeedsStatistics(step, index)) {
        const std::vector<float> a(kCols, 0.5f + static_cast<float>(rank)), g(kRows, 1.0f);
        PRECONDOR_RETURN_IF_ERROR(worker.SendStatistics(step, index, ConstMatrixView(a.data(), 1, kCols),
                                                        ConstMatrixView(g.data(), 1, kRows), 1));
      }
      if (!worker.SendsGradient(index)) continue;
      answers[layer] = ToSend(step, layer, rank);
      const MatrixView view(answers[layer].data(), kRows, kCols);
      futures[layer] = worker.Precondition(step, index, {view, view}, 1);
    }
    if (sent) sent();
    absl::Status status;
    for (const size_t layer : layers) {
      if (!worker.SendsGradient(static_cast<int64_t>(layer))) continue;
      const auto outcome = futures[layer].Wait();
      status.Update(outcome.status());
      if (!status.ok()) continue;
      if (rank == 0 || spec.exchange == ExchangeMode::kDelegate) decisions[layer].push_back(outcome->decision);
      if (spec.exchange == ExchangeMode::kDirect) {
        Apply(rank, layer, answers[layer]);
      } else {
        broadcast[layer] = answers[layer];
      }
    }
    return status;
  }
  void RunStep(uint32_t rank, uint64_t step, const std::function<void()>& sent = nullptr) {
    const absl::Status status = Work(rank, step, {0, 1, 2, 3, 4, 5}, sent);
    ASSERT_TRUE(status.ok()) << "rank " << rank << " step " << step << ": " << status;
    if (spec.exchange == ExchangeMode::kDelegate) ApplyBroadcast(rank);
  }
  void ApplyBroadcast(uint32_t rank) {
    together.arrive_and_wait();
    for (size_t layer = 0; layer < kLayers; ++layer) Apply(rank, layer, broadcast[layer]);
    together.arrive_and_wait();
  }
  void Apply(uint32_t rank, size_t layer, const std::vector<float>& answer) {
    for (size_t i = 0; i < kElements; ++i) weights[rank][layer][i] -= kRate * answer[i];
  }
  void Run(uint64_t from, uint64_t to) {
    ForEachRank(kWorkers, [&](uint32_t rank) {
      for (uint64_t step = from; step < to; ++step) {
        RunStep(rank, step);
        const auto directive = workers[rank]->ReportStep(step, 1.0, 1, true, 0.1).Wait();
        ASSERT_TRUE(directive.ok()) << directive.status();
        if (rank == 0) steps = step + 1;
      }
      ASSERT_TRUE(workers[rank]->Flush().ok());
    });
  }
  // As SIGKILL does: the shard tells no other process, and its connections break.
  void Kill(size_t shard) { shards[shard] = nullptr; }
  // In its place one that has an empty data directory.
  void Forget(size_t shard) {
    const int port = shards[shard]->app().port();
    Kill(shard);
    ServerConfig config = ShardConfig();
    config.listen = {absl::StrCat("127.0.0.1:", port)};
    shards[shard] = std::make_unique<RawServer>(config);
  }

  // The coordinator's call to a shard when a session is over, with the coordinator's own token, which the refusal of a
  // smaller one names.
  void RemoveSessionFrom(size_t shard) {
    const std::unique_ptr<v1::ShardService::Stub> stub = v1::ShardService::NewStub(shards[shard]->channel());
    v1::DescribeShardRequest describe;
    describe.set_fencing_token(1);
    v1::DescribeShardResponse described;
    TimedContext refused, asking, removing;
    const std::string refusal = stub->DescribeShard(&refused, describe, &described).error_message();
    const std::string before = "expected at least ";
    const size_t at = refusal.find(before);
    ASSERT_NE(at, std::string::npos) << refusal;
    describe.set_fencing_token(std::stoull(refusal.substr(at + before.size())));
    ASSERT_TRUE(stub->DescribeShard(&asking, describe, &described).ok());
    ASSERT_EQ(described.sessions_size(), 1);
    v1::RemoveSessionRequest request;
    request.set_session_id(described.sessions(0).session_id());
    request.set_fencing_token(describe.fencing_token());
    v1::RemoveSessionResponse response;
    const grpc::Status status = stub->RemoveSession(&removing, request, &response);
    ASSERT_TRUE(status.ok() && response.existed()) << status.error_message();
  }

  ServerConfig ShardConfig() {
    ServerConfig config;
    config.role = ServerRole::kShard;
    if (logs) config.data_dir = absl::StrCat(data.path(), "/", directories++);
    return config;
  }

  double MetricOf(size_t shard, const std::string& sample) const { return Metric(*shards[shard], sample); }

  const bool logs;
  TempDir data;
  int directories = 0;
  SessionSpec spec;
  std::vector<std::unique_ptr<RawServer>> shards;
  std::unique_ptr<RawServer> server;
  std::unique_ptr<Client> client;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<Weights> weights;                  // by rank
  std::vector<std::vector<Decision>> decisions;  // by layer, of every step
  Weights broadcast{kLayers};
  std::atomic<uint64_t> steps = 0;  // done by rank 0
  std::barrier<> together{kWorkers};
};

// A shard comes back with nothing, and gets the session again.
class ForgottenTest : public ::testing::Test {
 protected:
  static void ExpectEqualWeights(const Job& job) {
    for (uint32_t rank = 1; rank < kWorkers; ++rank) EXPECT_EQ(job.weights[rank], job.weights[0]) << "rank " << rank;
  }
  // Has shard 1 forget everything, every few steps of rank 0 until it has done `steps`.
  static int KeepForgetting(Job& job, uint64_t steps) {
    int forgot = 0;
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    for (uint64_t seen = 0; seen < steps && absl::Now() < deadline; std::this_thread::yield()) {
      const uint64_t now = job.steps;
      if (now < seen + 20) continue;
      seen = now;
      job.Forget(1);
      ++forgot;
    }
    return forgot;
  }
};

// However often, and wherever in a step the ranks are: workers that come before the session is there again wait for it,
// and what they send again of steps that are done holds nothing up.
TEST_F(ForgottenTest, WhereOneRankGetsEachAnswerTheJobGoesOn) {
  for (const bool keeps_logs : {true, false}) {
    Job job(ExchangeMode::kDelegate, keeps_logs);
    job.Join();
    std::thread training([&] { job.Run(0, 300); });
    EXPECT_GE(KeepForgetting(job, 260), 5);
    training.join();
    ExpectEqualWeights(job);
    EXPECT_GT(job.MetricOf(1, "precondor_updates_lost_total{train_job=\"job\"}"), 0);
  }
}

// No rank takes an answer that another has had otherwise: all go on with one state, or all are told to begin again, and
// can. Which of the two depends on where in a step the ranks are.
TEST_F(ForgottenTest, WhereAllRanksGetEachAnswerNoneGetsAnother) {
  Job job(ExchangeMode::kDirect);
  job.Join();
  std::vector<std::map<uint64_t, Weights>> before(kWorkers);  // by step: the rank's weights as it begins
  std::vector<absl::Status> ends(kWorkers);
  std::thread forgetting([&] { KeepForgetting(job, 20); });
  ForEachRank(kWorkers, [&](uint32_t rank) {
    for (uint64_t step = 0; step < 500 && ends[rank].ok(); ++step) {
      before[rank][step] = job.weights[rank];
      ends[rank] = job.Work(rank, step, {0, 1, 2, 3, 4, 5});
      if (ends[rank].ok()) ends[rank] = job.workers[rank]->ReportStep(step, 1.0, 1, true, 0.1).Wait().status();
      if (rank == 0) job.steps = step + 1;
    }
  });
  forgetting.join();
  uint64_t resume = std::numeric_limits<uint64_t>::max();
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    const ErrorReason expected = ends[0].ok() ? ErrorReason::kUnspecified : ErrorReason::kStateLost;
    EXPECT_EQ(GetErrorReason(ends[rank]), expected) << "rank " << rank << ": " << ends[rank];
    EXPECT_EQ(ends[rank].ok(), ends[0].ok()) << "rank " << rank << ": " << ends[rank];
    resume = std::min(resume, before[rank].rbegin()->first);
  }
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    for (const auto& [step, weights] : before[rank]) {
      if (step > resume) continue;
      EXPECT_EQ(weights, before[0].at(step)) << "rank " << rank << " step " << step;
    }
    if (!ends[0].ok()) job.weights[rank] = before[rank].at(resume);
  }
  EXPECT_GT(job.MetricOf(1, "precondor_updates_lost_total{train_job=\"job\"}"), 0);
  if (ends[0].ok()) return ExpectEqualWeights(job);
  job.Join(/*incarnation=*/2, resume);
  job.Run(resume, resume + 20);
  ExpectEqualWeights(job);
}

// The shard gets the session again from the coordinator within one process, on streams that stay. All ranks have the
// same answers: they go on with factors that are new, and each is told how many updates are lost.
TEST_F(ForgottenTest, ASessionThatIsRemovedAndInstalledAgainIsALossThatAllAreTold) {
  for (const bool keeps_logs : {true, false}) {
    Job job(ExchangeMode::kDirect, keeps_logs);
    job.Join();
    job.Run(0, 8);
    job.RemoveSessionFrom(1);
    job.Run(8, 16);
    ExpectEqualWeights(job);
    for (const auto& worker : job.workers) {
      const std::map<int64_t, uint64_t> lost = worker->status().lost_updates;
      EXPECT_EQ(lost.size(), kLayers / 3) << "of one shard";
      for (const auto& [layer, updates] : lost) EXPECT_EQ(updates, 2u) << "layer " << layer;
    }
  }
}

}  // namespace
}  // namespace precondor
