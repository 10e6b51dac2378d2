// SPDX-License-Identifier: Apache-2.0
// A job that degrades loses one of three shards and goes on: real servers and clients over TCP.
#include <atomic>
#include <barrier>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"

#include "precondor/client.h"
#include "tests/loopback/raw_client.h"

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
  explicit Job(ExchangeMode exchange) {
    ServerConfig shard;
    shard.role = ServerRole::kShard;
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 20;
    coordinator.shard_loss_ms = 400;
    coordinator.shard_timeout_ms = 500;
    for (int s = 0; s < 3; ++s) {
      shards.push_back(std::make_unique<RawServer>(shard));
      coordinator.shards.push_back(absl::StrCat("127.0.0.1:", shards.back()->app().port()));
    }
    server = std::make_unique<RawServer>(coordinator);
    spec.name = "job";
    spec.world_size = kWorkers;
    spec.exchange = exchange;
    spec.statistics = StatisticsKind::kPerWorkerMean;
    spec.inv_freq = 4;
    spec.warmup_steps = 0;
    spec.method.options["rank"] = 4.0;
    spec.on_shard_loss = ShardLossPolicy::kDegrade;
    for (size_t i = 0; i < kLayers; ++i) spec.layers.push_back({absl::StrCat("layer", i), kRows, kCols, false});
    weights.assign(kWorkers, Weights(kLayers, std::vector<float>(kElements, 1.0f)));
    decisions.assign(kLayers, {});
  }

  void Join() {
    ClientOptions options;
    options.coordinator = absl::StrCat("127.0.0.1:", server->app().port());
    auto connected = Client::Connect(options);
    ASSERT_TRUE(connected.ok()) << connected.status();
    client = *std::move(connected);
    ASSERT_TRUE(client->OpenSession(spec).ok());
    workers.resize(kWorkers);
    ForEachRank([&](uint32_t rank) {
      auto worker = client->Join(spec.name, {.rank = rank, .incarnation = 1});
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers[rank] = *std::move(worker);
    });
  }
  void ForEachRank(const std::function<void(uint32_t)>& work) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kWorkers; ++rank) threads.emplace_back([&, rank] { work(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  // What a rank's data give at these weights.
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

  // `sent` is called when the rank has sent all that it sends in the step.
  void RunStep(uint32_t rank, uint64_t step, const std::function<void()>& sent = nullptr) {
    Worker& worker = *workers[rank];
    std::vector<std::vector<float>> answers(kLayers);
    std::vector<PreconditionFuture> futures(kLayers);
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const int64_t index = static_cast<int64_t>(layer);
      if (worker.NeedsStatistics(step)) {
        const std::vector<float> a(kCols, 0.5f + static_cast<float>(rank)), g(kRows, 1.0f);
        const absl::Status taken = worker.SendStatistics(step, index, ConstMatrixView(a.data(), 1, kCols),
                                                         ConstMatrixView(g.data(), 1, kRows), 1);
        ASSERT_TRUE(taken.ok()) << taken;
      }
      if (!worker.SendsGradient(index)) continue;
      answers[layer] = ToSend(step, layer, rank);
      const MatrixView view(answers[layer].data(), kRows, kCols);
      futures[layer] = worker.Precondition(step, index, view, view, 1);
    }
    if (sent) sent();
    for (size_t layer = 0; layer < kLayers; ++layer) {
      if (!worker.SendsGradient(static_cast<int64_t>(layer))) continue;
      const auto outcome = futures[layer].Wait();
      ASSERT_TRUE(outcome.ok()) << "step " << step << ": " << outcome.status();
      if (rank == 0 || spec.exchange == ExchangeMode::kDelegate) decisions[layer].push_back(outcome->decision);
      if (spec.exchange == ExchangeMode::kDirect) {
        Apply(rank, layer, answers[layer]);
      } else {
        broadcast[layer] = answers[layer];
      }
    }
    if (spec.exchange == ExchangeMode::kDirect) return;
    together.arrive_and_wait();
    for (size_t layer = 0; layer < kLayers; ++layer) Apply(rank, layer, broadcast[layer]);
    together.arrive_and_wait();
  }
  void Apply(uint32_t rank, size_t layer, const std::vector<float>& answer) {
    for (size_t i = 0; i < kElements; ++i) weights[rank][layer][i] -= kRate * answer[i];
  }
  void Run(uint64_t from, uint64_t to) {
    ForEachRank([&](uint32_t rank) {
      for (uint64_t step = from; step < to; ++step) {
        RunStep(rank, step);
        const auto directive = workers[rank]->ReportStep(step, 1.0, 1, true, 0.1);
        ASSERT_TRUE(directive.ok()) << directive.status();
      }
      ASSERT_TRUE(workers[rank]->Flush().ok());
    });
  }
  // As SIGKILL does: nobody is told, connections break.
  void Kill(size_t shard) { shards[shard] = nullptr; }

  SessionSpec spec;
  std::vector<std::unique_ptr<RawServer>> shards;
  std::unique_ptr<RawServer> server;
  std::unique_ptr<Client> client;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<Weights> weights;                  // by rank
  std::vector<std::vector<Decision>> decisions;  // by layer, of every step
  Weights broadcast{kLayers};
  std::barrier<> together{kWorkers};
};

class ShardLossTest : public ::testing::TestWithParam<ExchangeMode> {
 protected:
  static void ExpectEqualWeights(const Job& job) {
    for (uint32_t rank = 1; rank < kWorkers; ++rank) EXPECT_EQ(job.weights[rank], job.weights[0]) << "rank " << rank;
  }
};

// Equal layers: shard 1 has layers 1 and 4.
TEST_P(ShardLossTest, TheJobGoesOnWithFreshFactorsAndEqualWeights) {
  Job job(GetParam());
  job.Join();
  job.Run(0, 7);
  ExpectEqualWeights(job);
  // Everybody has the answers to step 6, and nobody hears of the loss but by what it sends next.
  job.Kill(1);
  job.Run(7, 20);
  ExpectEqualWeights(job);
  for (uint32_t rank = 0; rank < kWorkers; ++rank) EXPECT_EQ(job.workers[rank]->epoch(), 2u);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_EQ(job.decisions[layer].size(), 20u);
    const bool lost = layer % 3 == 1;
    for (uint64_t step = 0; step < 20; ++step) {
      // The first statistics after the loss come with step 8.
      const Decision expected = lost && step == 7 ? Decision::kIdentity : Decision::kPreconditioned;
      EXPECT_EQ(job.decisions[layer][step], expected) << "layer " << layer << " step " << step;
    }
  }
}

// Contributions to the step that the shard takes with it are sent again to those that come after it.
TEST_P(ShardLossTest, WhatTheShardHadTakenInIsSentAgain) {
  Job job(GetParam());
  job.Join();
  job.Run(0, 8);
  // Rank 0 keeps its statistics of step 8 back until the shard is gone: nobody has an answer of it.
  std::atomic<int> sent = 0;
  job.ForEachRank([&](uint32_t rank) {
    if (rank == 0) {
      const absl::Time deadline = absl::Now() + absl::Seconds(60);
      while (sent < kWorkers - 1 && absl::Now() < deadline) std::this_thread::yield();
      ASSERT_EQ(sent, kWorkers - 1);
      for (uint32_t other = 1; other < kWorkers; ++other) ASSERT_TRUE(job.workers[other]->Flush().ok());
      job.Kill(1);
    }
    job.RunStep(rank, 8, [&] { sent += rank == 0 ? 0 : 1; });
    ASSERT_TRUE(job.workers[rank]->ReportStep(8, 1.0, 1, true, 0.1).ok());
  });
  for (uint32_t rank = 0; rank < kWorkers; ++rank) EXPECT_EQ(job.workers[rank]->epoch(), 2u);
  for (const size_t layer : {1, 4}) EXPECT_EQ(job.decisions[layer].back(), Decision::kPreconditioned);
  job.Run(9, 12);
  ExpectEqualWeights(job);
}

INSTANTIATE_TEST_SUITE_P(Exchanges, ShardLossTest, ::testing::Values(ExchangeMode::kDelegate),
                         [](const auto& info) { return std::string(ExchangeModeName(info.param)); });

}  // namespace
}  // namespace precondor
