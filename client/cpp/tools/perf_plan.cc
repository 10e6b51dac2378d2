// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/perf_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "client/cpp/src/control.h"
#include "client/cpp/tools/plan.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "precondor/client.h"

namespace precondor {
namespace {

constexpr int32_t kInvFreq = 10;
constexpr int kPlanRounds = 3;   // machines drift
constexpr double kWithin = 0.2;  // of the plan

SessionSpec PlannedSpec(const PerfOptions& options, const std::vector<LayerSpec>& layers, const std::string& method) {
  SessionSpec spec;
  spec.name = absl::StrCat("perf-plan-", method, "-", layers.size());
  spec.world_size = static_cast<int32_t>(options.workers);
  spec.exchange = ExchangeMode::kDelegate;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.inv_freq = kInvFreq;
  spec.warmup_steps = 0;
  spec.method.name = method;
  if (method == "mkor") {
    spec.method.options["representation"] = std::string("LOW_RANK");
    spec.method.options["rank"] = static_cast<double>(options.rank);
  }
  spec.layers = layers;
  return spec;
}

// One rank's tensors.
struct RankData {
  std::vector<std::vector<float>> gradients, answers;  // by layer
  std::vector<float> vectors;
};

RankData MakeData(const std::vector<LayerSpec>& layers, uint32_t rank) {
  RankData data;
  int64_t widest = 0;
  for (const LayerSpec& layer : layers) {
    std::vector<float> gradient(static_cast<size_t>(layer.d_out * layer.d_in));
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>((i * 7919 + rank) % 1009) - 504;
    data.answers.push_back(gradient);
    data.gradients.push_back(std::move(gradient));
    widest = std::max({widest, layer.d_in, layer.d_out});
  }
  for (int64_t i = 0; i < 4 * widest; ++i) data.vectors.push_back(static_cast<float>((i * i + rank) % 211) - 105);
  return data;
}

absl::Status RunStep(Worker& worker, RankData& data, uint64_t step) {
  std::vector<PreconditionFuture> futures;
  for (size_t layer = 0; layer < data.gradients.size(); ++layer) {
    const LayerSpec& shape = worker.spec().layers[layer];
    const auto index = static_cast<int64_t>(layer);
    // Another place at every step: equal vectors would make factors of rank 1.
    const float* const vectors = data.vectors.data() + step * 31 % (data.vectors.size() / 2);
    if (worker.NeedsStatistics(step, index)) {
      PRECONDOR_RETURN_IF_ERROR(worker.SendStatistics(step, index, ConstMatrixView(vectors, 1, shape.d_in),
                                                      ConstMatrixView(vectors + 1, 1, shape.d_out), 1));
    }
    if (!worker.SendsGradient(index)) continue;
    futures.push_back(worker.Precondition(step, index,
                                          ConstMatrixView(data.gradients[layer].data(), shape.d_out, shape.d_in),
                                          MatrixView(data.answers[layer].data(), shape.d_out, shape.d_in), 1));
  }
  for (const PreconditionFuture& future : futures) PRECONDOR_RETURN_IF_ERROR(future.Wait().status());
  return worker.ReportStep(step, 1.0, 1, true, 0.1).status();
}

struct StepTimes {
  double seconds = 0;         // of a mean step
  double kernel_seconds = 0;  // of it, summed over the server's threads
};

absl::StatusOr<double> KernelSeconds(ControlClient& control, const std::string& session) {
  v1::GetLayerStatsRequest request;
  request.set_session(session);
  Canceller canceller;
  PRECONDOR_ASSIGN_OR_RETURN(const v1::GetLayerStatsResponse response, control.GetLayerStats(request, canceller));
  double seconds = 0;
  for (const v1::LayerStats& layer : response.layers()) {
    // A repeated answer counts as another gradient; there is none without a lost connection.
    seconds += layer.update_seconds() * static_cast<double>(layer.factor_version()) +
               layer.precondition_seconds() * static_cast<double>(layer.preconditioned());
  }
  return seconds;
}

// Mean of `steps` steps behind `warmup` others.
absl::StatusOr<StepTimes> RunSteps(const SessionSpec& spec, const PerfOptions& options, const PerfServer& server) {
  ClientOptions client_options;
  client_options.coordinator = server.address();
  ControlClient control(server.address(), absl::Seconds(30), options.security);
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Client::Connect(client_options));
  PRECONDOR_RETURN_IF_ERROR(client->OpenSession(spec).status());
  // Whole cycles of statistics.
  const auto whole = [&](int64_t steps) {
    return static_cast<uint64_t>((steps + spec.inv_freq - 1) / spec.inv_freq * spec.inv_freq);
  };
  const uint64_t warmup = whole(options.warmup), steps = whole(options.steps);
  std::vector<std::unique_ptr<Worker>> workers(static_cast<size_t>(spec.world_size));
  std::vector<RankData> data;
  for (uint32_t rank = 0; rank < workers.size(); ++rank) data.push_back(MakeData(spec.layers, rank));
  const auto for_each_rank = [&](const auto& body) {
    std::vector<absl::Status> statuses(workers.size());
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < workers.size(); ++rank) {
      threads.emplace_back([&, rank] { statuses[rank] = body(rank); });
    }
    for (std::thread& thread : threads) thread.join();
    absl::Status all;
    for (const absl::Status& status : statuses) all.Update(status);
    return all;
  };
  const auto run = [&](uint64_t from, uint64_t to) {
    return for_each_rank([&](uint32_t rank) {
      for (uint64_t step = from; step < to; ++step) {
        PRECONDOR_RETURN_IF_ERROR(RunStep(*workers[rank], data[rank], step));
      }
      return absl::OkStatus();
    });
  };
  PRECONDOR_RETURN_IF_ERROR(for_each_rank([&](uint32_t rank) -> absl::Status {
    PRECONDOR_ASSIGN_OR_RETURN(workers[rank], client->Join(spec.name, {rank, 0}));
    return absl::OkStatus();
  }));
  PRECONDOR_RETURN_IF_ERROR(run(0, warmup));
  PRECONDOR_ASSIGN_OR_RETURN(const double before, KernelSeconds(control, spec.name));
  const absl::Time start = MonotonicNow();
  PRECONDOR_RETURN_IF_ERROR(run(warmup, warmup + steps));
  const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
  PRECONDOR_ASSIGN_OR_RETURN(const double after, KernelSeconds(control, spec.name));
  workers.clear();
  PRECONDOR_RETURN_IF_ERROR(client->CloseSession(spec.name).status());
  return StepTimes{seconds / static_cast<double>(steps), (after - before) / static_cast<double>(steps)};
}

absl::StatusOr<Plan> PlanOf(const SessionSpec& spec, const PerfOptions& options, double gbps, double tflops) {
  return MakePlan({.spec = spec,
                   .network_gbps = gbps,
                   .device_tflops = tflops,
                   .shard_memory_bytes = int64_t{1} << 50,
                   .shards = 1,
                   .threads = options.threads});
}

// One comparison: the rates as measured, what they make of the plan, and what steps took.
struct Round {
  double gbps = 0, tflops = 0;
  double network_ms = 0, arithmetic_ms = 0;  // planned
  double measured_arithmetic_ms = 0, measured_step_ms = 0;
  double planned_step_ms() const { return network_ms + arithmetic_ms; }
  double ratio() const { return measured_step_ms / planned_step_ms(); }
};

absl::StatusOr<Round> RunRound(const PerfOptions& options, const std::vector<LayerSpec>& layers,
                               const PerfServer& server) {
  // Layers of a model repeat, and so every second one is a fair sample of it.
  std::vector<LayerSpec> sample;
  for (size_t i = 0; i < layers.size(); i += 2) sample.push_back(layers[i]);
  const SessionSpec moved = PlannedSpec(options, sample, "identity");
  const SessionSpec computed = PlannedSpec(options, sample, "mkor");
  const SessionSpec planned = PlannedSpec(options, layers, "mkor");
  // At one Gbit/s and one TFLOP/s, seconds are the inverse of a rate that takes one.
  PRECONDOR_ASSIGN_OR_RETURN(const Plan of_moved, PlanOf(moved, options, 1, 1));
  PRECONDOR_ASSIGN_OR_RETURN(const Plan of_computed, PlanOf(computed, options, 1, 1));
  PRECONDOR_ASSIGN_OR_RETURN(const StepTimes transport, RunSteps(moved, options, server));
  PRECONDOR_ASSIGN_OR_RETURN(const StepTimes kernels, RunSteps(computed, options, server));
  const auto threads = static_cast<double>(options.threads);
  Round round;
  round.gbps = of_moved.network_seconds / transport.seconds;
  round.tflops = of_computed.shard_seconds / (kernels.kernel_seconds / threads);
  PRECONDOR_ASSIGN_OR_RETURN(const Plan plan, PlanOf(planned, options, round.gbps, round.tflops));
  PRECONDOR_ASSIGN_OR_RETURN(const StepTimes step, RunSteps(planned, options, server));
  round.network_ms = plan.network_seconds * 1e3;
  round.arithmetic_ms = plan.shard_seconds * 1e3;
  round.measured_arithmetic_ms = step.kernel_seconds / threads * 1e3;
  round.measured_step_ms = step.seconds * 1e3;
  return round;
}

}  // namespace

absl::StatusOr<std::vector<PerfRow>> MeasurePlan(const PerfOptions& options, const PerfServer& server) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerSpec> layers, PerfLayers(options));
  std::vector<Round> rounds;
  for (int i = 0; i < kPlanRounds; ++i) {
    PRECONDOR_ASSIGN_OR_RETURN(const Round round, RunRound(options, layers, server));
    rounds.push_back(round);
  }
  std::sort(rounds.begin(), rounds.end(), [](const Round& x, const Round& y) { return x.ratio() < y.ratio(); });
  const Round& median = rounds[kPlanRounds / 2];
  return std::vector<PerfRow>{
      {"plan/network_rate", median.gbps, "Gbit/s"},
      {"plan/arithmetic_rate", median.tflops, "TFLOP/s"},
      {"plan/network", median.network_ms, "ms"},
      {"plan/arithmetic", median.measured_arithmetic_ms, "ms", median.arithmetic_ms,
       median.measured_arithmetic_ms / median.arithmetic_ms},
      {"plan/step", median.measured_step_ms, "ms", median.planned_step_ms(), median.ratio(), std::nullopt,
       std::abs(median.ratio() - 1) <= kWithin},
      {"plan/least_ratio", rounds.front().ratio(), "x"},
      {"plan/greatest_ratio", rounds.back().ratio(), "x"},
  };
}

}  // namespace precondor
