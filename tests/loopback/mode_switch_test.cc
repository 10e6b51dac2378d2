// SPDX-License-Identifier: Apache-2.0
// A job that falls back to first order, returns, and loses its coordinator in between, over TCP: what every worker
// gets at every step, what moves, and that the factors go on from where they were.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "precondor/client.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/relay.h"
#include "tests/loopback/service_client.h"
#include "tests/support/dead_port.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

constexpr int64_t kOut = 6, kIn = 5;
constexpr int32_t kWorkers = 4;
constexpr uint64_t kLease = 8;
constexpr int64_t kElements = kOut * kIn;

// A gradient that no other (step, layer, rank) has. It has small integers, so that sums are exact.
std::vector<float> Gradient(uint64_t step, int64_t layer, uint32_t rank) {
  std::vector<float> out(kElements);
  for (int64_t i = 0; i < kElements; ++i) {
    out[static_cast<size_t>(i)] =
        static_cast<float>((step * 7 + static_cast<uint64_t>(layer * 3 + i) + rank * 5) % 17) - 8;
  }
  return out;
}

// The weights of the job's average: every worker has one sample.
std::vector<float> Average(uint64_t step, int64_t layer) {
  std::vector<double> sum(kElements);
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    const std::vector<float> gradient = Gradient(step, layer, rank);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
  }
  std::vector<float> out;
  for (const double value : sum) out.push_back(static_cast<float>(value / kWorkers));
  return out;
}

struct Answer {
  Mode mode = Mode::kSecondOrder;
  Decision decision = Decision::kSkip;
  uint64_t factor_version = 0;
  std::vector<float> values;
  bool operator==(const Answer&) const = default;
};

class Job {
 public:
  // `data_dir`: where shards have theirs; empty: they have none.
  explicit Job(ExchangeMode exchange, FallbackConfig fallback, const std::string& data_dir = "") {
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.lease_steps = kLease;
    coordinator.reconcile_interval_ms = 10;
    for (int s = 0; s < 2; ++s) {
      ServerConfig& config = configs.emplace_back();
      config.role = ServerRole::kShard;
      if (!data_dir.empty()) config.data_dir = absl::StrCat(data_dir, "/shard", s);
      shards.push_back(nullptr);
      shard_relays.push_back(std::make_unique<Relay>());
      StartShard(static_cast<size_t>(s));
      coordinator.shards.push_back(shard_relays.back()->address());
    }
    server = std::make_unique<RawServer>(coordinator);
    relay.Target(server->app().port());
    spec.name = "job";
    spec.world_size = kWorkers;
    spec.exchange = exchange;
    spec.statistics = StatisticsKind::kPerWorkerMean;
    spec.inv_freq = 2;
    spec.warmup_steps = 0;
    spec.method.options["rank"] = 4.0;
    spec.fallback = fallback;
    for (int layer = 0; layer < 4; ++layer) spec.layers.push_back({absl::StrCat("layer", layer), kOut, kIn, false});
  }

  void Join() {
    client = ConnectTo(relay.address());
    ASSERT_TRUE(client->OpenSession(spec).ok());
    workers = JoinAll(*client, spec);
  }

  // One rank's part of a step, as a trainer does it; its answers by layer.
  std::vector<Answer> RunStep(uint32_t rank, uint64_t step) {
    Worker& worker = *workers[rank];
    std::vector<Answer> answers(spec.layers.size());
    std::vector<PreconditionFuture> futures(spec.layers.size());
    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
      const int64_t index = static_cast<int64_t>(layer);
      answers[layer].mode = worker.ModeOf(step);
      if (worker.NeedsStatistics(step, index)) {
        const std::vector<float> a(kIn, 0.5f + static_cast<float>(rank)), g(kOut, 1.0f);
        EXPECT_TRUE(
            worker.SendStatistics(step, index, ConstMatrixView(a.data(), 1, kIn), ConstMatrixView(g.data(), 1, kOut), 1)
                .ok());
      }
      if (!worker.SendsGradient(index)) continue;
      const uint64_t of = step + gradients_ahead;
      answers[layer].values = spec.exchange == ExchangeMode::kDirect ? Gradient(of, index, rank) : Average(of, index);
      // A rank that has the job's average need not ask in first order.
      if (rank == 0 && answers[layer].mode == Mode::kFirstOrder && WorkersPrecondition(spec)) {
        answers[layer].decision = Decision::kIdentity;
        continue;
      }
      const MatrixView view(answers[layer].values.data(), kOut, kIn);
      futures[layer] = worker.Precondition(step, index, {view, view}, 1);
    }
    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
      if (answers[layer].decision == Decision::kIdentity || !worker.SendsGradient(static_cast<int64_t>(layer)))
        continue;
      const auto outcome = futures[layer].Wait();
      EXPECT_TRUE(outcome.ok()) << outcome.status();
      if (!outcome.ok()) continue;
      answers[layer].decision = outcome->decision;
      answers[layer].factor_version = outcome->factor_version;
    }
    // But for DIRECT it is the job that keeps its workers together: each needs the others' layers, or gradients.
    if (spec.exchange != ExchangeMode::kDirect) step_done.arrive_and_wait();
    return answers;
  }
  // Steps [from, to) on all ranks: [step - from][rank][layer].
  std::vector<std::vector<std::vector<Answer>>> Run(uint64_t from, uint64_t to) {
    std::vector<std::vector<std::vector<Answer>>> all(to - from, std::vector<std::vector<Answer>>(kWorkers));
    ForEachRank(kWorkers, [&](uint32_t rank) {
      for (uint64_t step = from; step < to; ++step) {
        all[step - from][rank] = RunStep(rank, step);
        const auto directive = workers[rank]->ReportStep(step, 1.0, 1, true, 0.1).Wait();
        EXPECT_TRUE(directive.ok()) << directive.status();
      }
      EXPECT_TRUE(workers[rank]->Flush().ok());
    });
    return all;
  }
  // The traffic of all workers.
  Traffic TotalTraffic() const {
    Traffic total;
    for (const auto& worker : workers) {
      const Traffic traffic = worker->status().traffic;
      total.statistics_bytes += traffic.statistics_bytes;
      total.gradient_bytes += traffic.gradient_bytes;
      total.result_bytes += traffic.result_bytes;
    }
    return total;
  }
  void Force(v1::Mode mode) {
    v1::SetModeRequest request;
    request.set_session(spec.name);
    request.set_mode(mode);
    v1::SetModeResponse response;
    TimedContext context;
    const grpc::Status status = server->admin->SetMode(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  void StartShard(size_t shard) {
    shards[shard] = std::make_unique<RawServer>(configs[shard]);
    shard_relays[shard]->Target(shards[shard]->app().port());
  }
  // As SIGKILL does: the shard tells no other process, and its connections break.
  void KillShard(size_t shard) { shards[shard] = nullptr; }

  SessionSpec spec;
  std::vector<ServerConfig> configs;                 // of shards
  std::vector<std::unique_ptr<Relay>> shard_relays;  // behind which they may come back under another port
  std::vector<std::unique_ptr<RawServer>> shards;
  std::unique_ptr<RawServer> server;
  Relay relay;  // to the coordinator
  std::unique_ptr<Client> client;
  std::vector<std::unique_ptr<Worker>> workers;
  std::barrier<> step_done{kWorkers};
  uint64_t gradients_ahead = 0;  // a step has the gradients of so many steps later
};

class ModeSwitchTest : public ::testing::TestWithParam<ExchangeMode> {
 protected:
  // Every rank that has an answer has the first one's.
  static const Answer& Common(const std::vector<std::vector<Answer>>& ranks, size_t layer) {
    const std::vector<Answer>* first = nullptr;
    for (const std::vector<Answer>& answers : ranks) {
      if (answers[layer].values.empty()) continue;
      if (first == nullptr) first = &answers;
      EXPECT_EQ(answers[layer], (*first)[layer]);
    }
    return (*first)[layer];
  }
  static void ExpectFirstOrder(const std::vector<std::vector<Answer>>& ranks, uint64_t step) {
    for (size_t layer = 0; layer < 4; ++layer) {
      const Answer& answer = Common(ranks, layer);
      EXPECT_EQ(answer.mode, Mode::kFirstOrder) << step;
      EXPECT_EQ(answer.decision, Decision::kIdentity) << step;
      EXPECT_EQ(answer.values, Average(step, static_cast<int64_t>(layer))) << step;
    }
  }
  static void ExpectSecondOrder(const std::vector<std::vector<Answer>>& ranks, uint64_t step, uint64_t version) {
    for (size_t layer = 0; layer < 4; ++layer) {
      const Answer& answer = Common(ranks, layer);
      EXPECT_EQ(answer.mode, Mode::kSecondOrder) << step;
      EXPECT_EQ(answer.decision, Decision::kPreconditioned) << step;
      EXPECT_EQ(answer.factor_version, version) << step;
      EXPECT_NE(answer.values, Average(step, static_cast<int64_t>(layer))) << step;
    }
  }
};

// An operator's choice holds from the first step that no rank has been granted: 39 + kLease is the last granted one.
constexpr uint64_t kFallback = 20, kBack = 40 + kLease, kEnd = kBack + 10;

// The answers to steps kBack to kEnd of a job that had no step in first order: the ones after kFallback of another job.
std::vector<std::vector<std::vector<Answer>>> WithoutFirstOrder(ExchangeMode exchange) {
  Job job(exchange, {.policy = FallbackPolicy::kNever});
  job.Join();
  job.Run(0, kFallback);
  job.gradients_ahead = kBack - kFallback;
  return job.Run(kFallback, kFallback + kEnd - kBack);
}

TEST_P(ModeSwitchTest, FallsBackForAllAtOnceAndGoesOnWithTheFactorsThatItHad) {
  const auto expected = WithoutFirstOrder(GetParam());
  for (const bool lost : {false, true}) {
    SCOPED_TRACE(testing::Message() << "shards are lost in first order: " << lost);
    const TempDir dir;
    Job job(GetParam(), {.policy = FallbackPolicy::kAtStep, .at_step = kFallback}, lost ? dir.path() : "");
    job.Join();
    const auto second = job.Run(0, kFallback);
    for (uint64_t step = 0; step < kFallback; ++step) ExpectSecondOrder(second[step], step, step / 2 + 1);
    const std::string reserved = "precondor_job_reserved_bytes{train_job=\"job\"}";
    std::vector<double> before;
    for (const auto& shard : job.shards) before.push_back(Metric(*shard, reserved));
    const Traffic at_fallback = job.TotalTraffic();

    auto first = job.Run(kFallback, 30);
    for (size_t s = 0; lost && s < job.shards.size(); ++s) {
      job.KillShard(s);
      job.StartShard(s);
    }
    for (auto& step : job.Run(30, 40)) first.push_back(std::move(step));
    for (uint64_t step = kFallback; step < 40; ++step) ExpectFirstOrder(first[step - kFallback], step);
    const Traffic after = job.TotalTraffic();
    const int64_t moved = GetParam() == ExchangeMode::kDirect ? 20 * 4 * kWorkers * kElements * 4 : 0;
    if (!lost) {  // else with repetitions
      EXPECT_EQ(after.statistics_bytes, at_fallback.statistics_bytes);
      EXPECT_EQ(after.gradient_bytes - at_fallback.gradient_bytes, moved);
      EXPECT_EQ(after.result_bytes - at_fallback.result_bytes, moved);
    }
    for (size_t s = 0; s < job.shards.size(); ++s) {
      EXPECT_EQ(Metric(*job.shards[s], reserved), before[s]);
      for (const v1::LayerStats& layer : job.shards[s]->Stats("job")) {
        EXPECT_GT(layer.state_bytes(), 0u);
        EXPECT_EQ(layer.rejected(), 0u);
      }
    }
    EXPECT_EQ(Metric(*job.server, "precondor_second_order_mode{train_job=\"job\"}"), 0);

    job.Force(v1::MODE_SECOND_ORDER);
    const auto rest = job.Run(40, kEnd);
    for (uint64_t step = 40; step < kBack; ++step) ExpectFirstOrder(rest[step - 40], step);
    for (uint64_t step = kBack; step < kEnd; ++step) {
      EXPECT_EQ(rest[step - 40], expected[step - kBack]) << step;
      ExpectSecondOrder(rest[step - 40], step, (kFallback + step - kBack) / 2 + 1);
    }
  }
}

// A job that has fallen back, whose shards lose their memory, and that is told to return at kBack, up to that step.
void LoseShardsInFirstOrder(Job& job) {
  job.Join();
  job.Run(0, 30);
  for (size_t s = 0; s < job.shards.size(); ++s) {
    job.KillShard(s);
    job.StartShard(s);
  }
  job.Run(30, 40);
  job.Force(v1::MODE_SECOND_ORDER);
  job.Run(40, kBack);
}

class ServedModeSwitchTest : public ModeSwitchTest {};

TEST_P(ServedModeSwitchTest, ShardsThatLoseTheirMemoryInFirstOrderHaveFreshFactorsAtTheReturn) {
  Job job(GetParam(), {.policy = FallbackPolicy::kAtStep, .at_step = kFallback});
  LoseShardsInFirstOrder(job);
  const auto rest = job.Run(kBack, kEnd);
  for (uint64_t step = kBack; step < kEnd; ++step) ExpectSecondOrder(rest[step - kBack], step, (step - kBack) / 2 + 1);
  for (const auto& worker : job.workers) EXPECT_TRUE(worker->status().lost_updates.empty());
}

class WorkersFactorsModeSwitchTest : public ModeSwitchTest {};

// Workers have the factors of before, which the shards do not.
TEST_P(WorkersFactorsModeSwitchTest, ShardsThatLoseTheirMemoryInFirstOrderSaySoAtTheReturn) {
  Job job(GetParam(), {.policy = FallbackPolicy::kAtStep, .at_step = kFallback});
  LoseShardsInFirstOrder(job);
  for (const auto& worker : job.workers) {
    std::vector<float> values = Average(kBack, 0);
    const MatrixView view(values.data(), kOut, kIn);
    worker->AbstainStatistics(kBack, 0).IgnoreError();  // it may have heard of the loss
    EXPECT_EQ(GetErrorReason(worker->Precondition(kBack, 0, {view, view}, 1).Wait().status()), ErrorReason::kStateLost);
  }
}

TEST_P(ModeSwitchTest, ACoordinatorThatIsGoneStopsNobodyBeforeTheLeaseEnds) {
  Job job(GetParam(), {.policy = FallbackPolicy::kAtStep, .at_step = 10});
  job.Join();
  job.Run(0, 5);
  uint64_t granted = 0;
  for (uint32_t rank = 0; rank < kWorkers; ++rank) {
    granted = std::max(granted, job.workers[rank]->ReportStep(4, 1.0, 1, true, 0.1).Wait()->lease_through_step);
  }
  ASSERT_EQ(granted, 4 + kLease);
  const int there = job.server->app().port();
  const DeadPort nowhere;
  job.relay.Target(nowhere.number());
  job.relay.Cut();

  std::vector<std::vector<std::vector<Answer>>> all(10, std::vector<std::vector<Answer>>(kWorkers));
  std::atomic<uint64_t> furthest = 0;
  std::atomic<int> at_the_end = 0;
  auto training = std::async(std::launch::async, [&] {
    ForEachRank(kWorkers, [&](uint32_t rank) {
      for (uint64_t step = 5; step < 15; ++step) {
        uint64_t seen = furthest;
        while (seen < step && !furthest.compare_exchange_weak(seen, step)) {
        }
        all[step - 5][rank] = job.RunStep(rank, step);
        if (step == granted) ++at_the_end;
        const auto directive = job.workers[rank]->ReportStep(step, 1.0, 1, true, 0.1).Wait();
        EXPECT_TRUE(directive.ok()) << directive.status();
      }
    });
  });
  EXPECT_TRUE(WaitUntil([&] { return at_the_end == kWorkers; }));
  EXPECT_EQ(furthest, granted) << "no step beyond the lease is started";
  EXPECT_NE(training.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  job.relay.Target(there);
  training.get();
  for (uint64_t step = 5; step < 15; ++step) {
    if (step < 10) {
      ExpectSecondOrder(all[step - 5], step, step / 2 + 1);
    } else {
      ExpectFirstOrder(all[step - 5], step);
    }
  }
  // The reports that the ranks made while the server was gone have arrived.
  EXPECT_TRUE(WaitUntil([&] { return Metric(*job.server, "precondor_last_step_number{train_job=\"job\"}") == 14; }));
}

std::string NameOf(const ::testing::TestParamInfo<ExchangeMode>& info) {
  return std::string(ExchangeModeName(info.param));
}
constexpr ExchangeMode kServed[] = {ExchangeMode::kDirect, ExchangeMode::kDelegate};
constexpr ExchangeMode kByWorkers[] = {ExchangeMode::kReplay, ExchangeMode::kPullFactors};
INSTANTIATE_TEST_SUITE_P(Served, ModeSwitchTest, ::testing::ValuesIn(kServed), NameOf);
INSTANTIATE_TEST_SUITE_P(ByWorkers, ModeSwitchTest, ::testing::ValuesIn(kByWorkers), NameOf);
INSTANTIATE_TEST_SUITE_P(Exchange, ServedModeSwitchTest, ::testing::ValuesIn(kServed), NameOf);
INSTANTIATE_TEST_SUITE_P(Exchange, WorkersFactorsModeSwitchTest, ::testing::ValuesIn(kByWorkers), NameOf);

}  // namespace
}  // namespace precondor
