// SPDX-License-Identifier: Apache-2.0
// The predictions of precondorctl plan, against the counts of workers and the reservations of a shard.
#include <barrier>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "client/cpp/tools/plan.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/normal_floats.h"

namespace precondor {
namespace {

constexpr int32_t kWorkers = 2;
constexpr uint64_t kFirst = 4;   // not counted: in REPLAY a rank may then fetch factors, before or after an update
constexpr uint64_t kSteps = 12;  // three of them with statistics

SessionSpec Spec(ExchangeMode exchange) {
  SessionSpec spec;
  spec.name = "plan";
  spec.world_size = kWorkers;
  spec.exchange = exchange;
  spec.inv_freq = 4;
  spec.warmup_steps = 0;
  spec.method.options["rank"] = 16.0;
  spec.layers = {{"a", 96, 64, false}, {"b", 64, 96, false}, {"c", 96, 64, false}, {"d", 64, 96, false}};
  return spec;
}

absl::Status RunStep(Worker& worker, uint64_t step) {
  const SessionSpec& spec = worker.session().spec;
  std::vector<std::vector<float>> gradients(spec.layers.size());
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    const auto index = static_cast<int64_t>(layer);
    const auto& [d_out, d_in] = std::pair(spec.layers[layer].d_out, spec.layers[layer].d_in);
    const int64_t k = VectorsPerWorker(spec, index);
    const uint64_t seed = step * 100 + layer * 10 + worker.session().rank;
    if (worker.NeedsStatistics(step, index)) {
      const std::vector<float> a = Normal(k * d_in, seed), g = Normal(k * d_out, seed + 1);
      PRECONDOR_RETURN_IF_ERROR(worker.SendStatistics(step, index, ConstMatrixView(a.data(), k, d_in),
                                                      ConstMatrixView(g.data(), k, d_out), 1));
    }
    if (!worker.SendsGradient(index)) continue;
    gradients[layer] = Normal(d_out * d_in, step * 10 + layer);
    const MatrixView view(gradients[layer].data(), d_out, d_in);
    futures.push_back(worker.Precondition(step, index, {view, view}, 1));
  }
  for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
  return worker.ReportStep(step, 1.0, 1, true, 0.1).Wait().status();
}

struct Measured {
  double sent = 0;  // a step, by rank 0, which moves most
  double received = 0;
  int64_t reserved_bytes = 0;  // what the shard counts for the session
};

Measured Measure(const SessionSpec& spec) {
  RawServer server;
  const std::unique_ptr<Client> client = ConnectTo(server.address());
  EXPECT_TRUE(client->OpenSession(spec).ok());
  const auto reserved_bytes = static_cast<int64_t>(server.Info().reserved_bytes());
  Traffic before, after;            // of rank 0
  std::barrier step_end(kWorkers);  // in DELEGATE a job's ranks wait for each other: they share the answers
  ForEachRank(kWorkers, [&](uint32_t rank) {
    auto worker = client->Join(spec.name, {.rank = rank, .incarnation = 1, .first_step = 0});
    absl::Status done = worker.status();
    for (uint64_t step = 0; step < kFirst + kSteps && done.ok(); ++step) {
      if (rank == 0 && step == kFirst) before = (*worker)->status().traffic;
      done = RunStep(**worker, step);
      if (done.ok()) step_end.arrive_and_wait();
    }
    if (!done.ok()) step_end.arrive_and_drop();
    ASSERT_TRUE(done.ok()) << "rank " << rank << ": " << done;
    ASSERT_TRUE((*worker)->Flush().ok());
    if (rank == 0) after = (*worker)->status().traffic;
  });
  const auto a_step = [&](int64_t Traffic::*bytes) {
    return static_cast<double>(after.*bytes - before.*bytes) / kSteps;
  };
  return {a_step(&Traffic::statistics_bytes) + a_step(&Traffic::gradient_bytes), a_step(&Traffic::result_bytes),
          reserved_bytes};
}

class PlanTrafficTest : public ::testing::TestWithParam<ExchangeMode> {};

TEST_P(PlanTrafficTest, PayloadAndMemoryAreWhatThePlanSays) {
  PlanInput input;
  input.spec = Spec(GetParam());
  input.network_gbps = 10;
  input.shard_memory_bytes = int64_t{1} << 30;
  input.threads = 2;  // RawServer's
  const auto plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto [sent, received, reserved_bytes] = Measure(input.spec);
  EXPECT_LE(reserved_bytes, plan->shards[0].reserved());
  EXPECT_GE(static_cast<double>(reserved_bytes), 0.95 * static_cast<double>(plan->shards[0].reserved()));
  EXPECT_NEAR(sent, plan->worker_sent, 0.2 * plan->worker_sent);
  // PULL_FACTORS: the plan has the factors at their fullest, so that it is a bound.
  if (GetParam() == ExchangeMode::kPullFactors) {
    EXPECT_LE(received, 1.2 * plan->worker_received);
  } else {
    EXPECT_NEAR(received, plan->worker_received, 0.2 * plan->worker_received);
  }
  RecordProperty("sent_per_step", std::to_string(sent));
  RecordProperty("received_per_step", std::to_string(received));
  RecordProperty("reserved", std::to_string(reserved_bytes));
  RecordProperty("planned_sent_per_step", std::to_string(plan->worker_sent));
  RecordProperty("planned_received_per_step", std::to_string(plan->worker_received));
  RecordProperty("planned_reserved", std::to_string(plan->shards[0].reserved()));
}

INSTANTIATE_TEST_SUITE_P(Exchange, PlanTrafficTest,
                         ::testing::Values(ExchangeMode::kDirect, ExchangeMode::kDelegate, ExchangeMode::kReplay,
                                           ExchangeMode::kPullFactors),
                         [](const auto& info) { return std::string(ExchangeModeName(info.param)); });

}  // namespace
}  // namespace precondor
