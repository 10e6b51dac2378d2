// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "absl/time/time.h"

#include "client/cpp/src/control.h"
#include "client/cpp/tools/perf.h"
#include "client/cpp/tools/perf_training.h"
#include "client/cpp/tools/plan.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr int kPlanRounds = 3;   // several, because the speed of machines drifts
constexpr double kWithin = 0.2;  // allowed relative deviation from the plan

struct StepTimes {
  double seconds = 0;         // mean of a step
  double kernel_seconds = 0;  // mean of a step's kernels, summed over the server's threads
};

absl::StatusOr<double> KernelSeconds(ControlClient& control, const std::string& session) {
  v1::GetLayerStatsRequest request;
  request.set_session(session);
  Canceller canceller;
  PRECONDOR_ASSIGN_OR_RETURN(const auto response, control.Call<v1::GetLayerStatsResponse>(request, canceller));
  double seconds = 0;
  for (const v1::LayerStats& layer : response.layers()) {
    // preconditioned() also counts repeated answers, which only a lost connection causes.
    seconds += layer.update_seconds() * static_cast<double>(layer.factor_version()) +
               layer.precondition_seconds() * static_cast<double>(layer.preconditioned());
  }
  return seconds;
}

// Returns the means over options.steps steps, after options.warmup steps that do not count. Both numbers are rounded up
// to whole cycles.
absl::StatusOr<StepTimes> RunSteps(const SessionSpec& spec, const PerfOptions& options, const PerfServer& server) {
  ControlClient control(server.address(), absl::Seconds(30), options.security);
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<TrainingSteps> run, TrainingSteps::Open(spec, server));
  const auto whole = [&](int64_t steps) {
    return static_cast<uint64_t>((steps + run->cycle() - 1) / run->cycle() * run->cycle());
  };
  PRECONDOR_RETURN_IF_ERROR(run->Run(whole(options.warmup)));
  PRECONDOR_ASSIGN_OR_RETURN(const double before, KernelSeconds(control, spec.name));
  const absl::Time start = MonotonicNow();
  const uint64_t steps = whole(options.steps);
  PRECONDOR_RETURN_IF_ERROR(run->Run(steps));
  const double seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
  PRECONDOR_ASSIGN_OR_RETURN(const double after, KernelSeconds(control, spec.name));
  PRECONDOR_RETURN_IF_ERROR(run->Close());
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

// One comparison: the measured rates, the plan made with them, and the measured step.
struct Round {
  double gbps = 0, tflops = 0;
  double network_ms = 0, arithmetic_ms = 0;  // planned
  double measured_arithmetic_ms = 0, measured_step_ms = 0;
  double planned_step_ms() const { return network_ms + arithmetic_ms; }
  double ratio() const { return measured_step_ms / planned_step_ms(); }
};

absl::StatusOr<Round> RunRound(const PerfOptions& options, const std::vector<LayerSpec>& layers,
                               const PerfServer& server) {
  // Layers of a model repeat, so every second layer is a fair sample.
  std::vector<LayerSpec> sample;
  for (size_t i = 0; i < layers.size(); i += 2) sample.push_back(layers[i]);
  const SessionSpec moved = TrainingSpec(options, sample, "identity", ExchangeMode::kDelegate);
  const SessionSpec computed = TrainingSpec(options, sample, "mkor", ExchangeMode::kDelegate);
  const SessionSpec planned = TrainingSpec(options, layers, "mkor", ExchangeMode::kDelegate);
  // At 1 Gbit/s and 1 TFLOP/s the planned seconds are the amounts of Gbit and TFLOP. Divided by measured seconds, they
  // give the rates.
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
