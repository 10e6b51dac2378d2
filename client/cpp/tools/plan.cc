// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/plan.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/registry.h"
#include "server/core/resources/reservation.h"
#include "server/policy/placement.h"

namespace precondor {
namespace {

// What the plan needs to know about a layer.
struct LayerCost {
  int64_t statistics = 0;  // bytes that one worker sends at a statistic step
  int64_t factors = 0;     // bytes that one worker receives at a statistic step
  int64_t gradient = 0;    // bytes of one gradient on the wire; 0 if gradients stay with the workers
  double precondition_flops = 0;
  double update_flops = 0;
};

struct Session {
  const PlanInput& input;
  const MethodSet& methods;
  std::vector<LayerCost> layers;
  std::vector<PlacementLayer> estimates;
};

LayerCost CostOf(const SessionSpec& spec, const Method& method, uint32_t index) {
  const LayerSpec& layer = spec.layers[index];
  LayerCost cost;
  if (method.needs_statistics()) {
    cost.statistics = StatisticsElements(spec, index) * static_cast<int64_t>(ByteSize(spec.statistics_dtype));
    if (spec.exchange == ExchangeMode::kReplay) {
      cost.factors = StatisticsScratchElements(spec, index) * static_cast<int64_t>(sizeof(float));
    }
    if (spec.exchange == ExchangeMode::kPullFactors) cost.factors = method.SavedBytes(layer);
  }
  if (!WorkersPrecondition(spec)) {
    cost.gradient = layer.d_out * layer.d_in * static_cast<int64_t>(ByteSize(spec.gradient_dtype));
  }
  // StepFlops grows linearly with the number of vectors of an update. For 0 vectors it counts the preconditioning, the
  // decompositions spread over their interval, and what a method without statistics learns from every gradient.
  cost.precondition_flops = method.StepFlops(layer, 0);
  cost.update_flops = std::max(0.0, method.StepFlops(layer, VectorsPerStep(spec, index)) - cost.precondition_flops);
  return cost;
}

Reservation Reserved(const Session& session, absl::Span<const uint32_t> layers) {
  return ComputeReservation(session.input.spec, session.methods, layers, kDefaultWindowSteps,
                            static_cast<int>(session.input.threads), session.input.shard_memory_bytes);
}

struct Placed {
  std::vector<ShardLoad> shards;
  std::string
      reason;  // empty if the shards hold all layers; else `shards` is as if memory had no limit, if that suffices
};

Placed Place(const Session& session, int64_t shards) {
  const PlanInput& input = session.input;
  const auto place = [&](int64_t memory) {
    return PlaceLayers(session.estimates,
                       std::vector<PlacementShard>(static_cast<size_t>(shards), {.free_bytes = memory}));
  };
  Placed placed;
  Placement placement = place(input.shard_memory_bytes);
  if (!placement.feasible) {
    placed.reason = absl::StrCat(placement.reason, " of ", input.shard_memory_bytes);
    placement = place(std::numeric_limits<int64_t>::max());
    if (!placement.feasible)
      return Placed{.shards = std::vector<ShardLoad>(static_cast<size_t>(shards)), .reason = placement.reason};
  }
  placed.shards.resize(static_cast<size_t>(shards));
  std::vector<std::vector<uint32_t>> of_shard(placed.shards.size());
  // Whole gradients of a layer that its shard receives in a step.
  const double copies = input.spec.exchange == ExchangeMode::kDirect ? input.spec.world_size : 1;
  const double workers = input.spec.world_size, statistic_steps = 1.0 / input.spec.inv_freq;  // in an average step
  for (uint32_t index = 0; index < session.layers.size(); ++index) {
    const LayerCost& layer = session.layers[index];
    const auto owner = static_cast<size_t>(placement.shard_of_layer[index]);
    ShardLoad& shard = placed.shards[owner];
    shard.received += workers * static_cast<double>(layer.statistics) * statistic_steps +
                      copies * static_cast<double>(layer.gradient);
    shard.sent +=
        workers * static_cast<double>(layer.factors) * statistic_steps + copies * static_cast<double>(layer.gradient);
    shard.step_flops += layer.update_flops * statistic_steps;
    if (!WorkersPrecondition(input.spec)) shard.step_flops += layer.precondition_flops;
    of_shard[owner].push_back(index);
  }
  for (size_t s = 0; s < of_shard.size(); ++s) {
    const Reservation reservation = Reserved(session, of_shard[s]);
    ShardLoad& shard = placed.shards[s];
    shard.layers = static_cast<int64_t>(of_shard[s].size());
    shard.cost = placement.load[s];
    shard.states = reservation.states;
    shard.staging = reservation.staging;
    shard.scratch = reservation.scratch;
    if (shard.reserved() <= input.shard_memory_bytes || !placed.reason.empty()) continue;
    placed.reason = absl::StrCat("shard ", s, " of ", shards, " needs ", shard.reserved(), " bytes, ", shard.scratch,
                                 " of them scratch; it has ", input.shard_memory_bytes);
  }
  return placed;
}

// Returns the fewest shards that hold all layers, or 0 and the reason if kMaxPlanShards shards are too few.
int64_t ShardsByMemory(const Session& session, std::string& reason) {
  const PlanInput& input = session.input;
  double total = 0;
  for (uint32_t i = 0; i < session.layers.size(); ++i) {
    const int64_t alone = Reserved(session, {&i, 1}).total();
    if (alone > input.shard_memory_bytes) {
      reason = absl::StrCat("layer ", i, " \"", input.spec.layers[i].name, "\" needs ", alone,
                            " bytes by itself; a shard has ", input.shard_memory_bytes);
      return 0;
    }
    total += static_cast<double>(session.estimates[i].bytes);
  }
  const auto at_least = static_cast<int64_t>(total / static_cast<double>(input.shard_memory_bytes));
  for (int64_t shards = std::max<int64_t>(1, at_least); shards <= kMaxPlanShards; ++shards) {
    if (Place(session, shards).reason.empty()) return shards;
  }
  reason = absl::StrCat("more than ", kMaxPlanShards, " shards would be needed");
  return 0;
}

// Returns the traffic of the worker that moves most. A worker sends gradients of every world_size-th layer in DELEGATE,
// a part of each in SHARDED, and otherwise those of all layers.
WorkerTraffic BusiestWorker(const SessionSpec& spec, const std::vector<LayerCost>& layers) {
  WorkerTraffic traffic;
  std::vector<int64_t> gradients(static_cast<size_t>(spec.world_size), 0);
  const bool delegates = spec.exchange == ExchangeMode::kDelegate;
  for (size_t i = 0; i < layers.size(); ++i) {
    traffic.statistics_sent += layers[i].statistics;
    traffic.factors_received += layers[i].factors;
    const auto rank = delegates ? DelegateRank(spec, static_cast<int64_t>(i)) : 0;
    const int64_t parts = spec.exchange == ExchangeMode::kSharded ? spec.world_size : 1;
    gradients[static_cast<size_t>(rank)] += (layers[i].gradient + parts - 1) / parts;
  }
  traffic.gradients_sent = *std::max_element(gradients.begin(), gradients.end());
  traffic.answers_received = traffic.gradients_sent;
  return traffic;
}

void AddTimes(const PlanInput& input, Plan& plan) {
  double shard_bytes = 0, total_cost = 0, busiest_cost = 0, busiest_flops = 0;
  for (const ShardLoad& shard : plan.shards) {
    shard_bytes = std::max({shard_bytes, shard.received, shard.sent});
    busiest_cost = std::max(busiest_cost, shard.cost);
    busiest_flops = std::max(busiest_flops, shard.step_flops);
    total_cost += shard.cost;
  }
  const auto shards = static_cast<double>(plan.shards.size());
  plan.imbalance = total_cost > 0 ? busiest_cost * shards / total_cost : 1;
  const double worker_bytes = std::max(plan.worker_sent, plan.worker_received);
  plan.network_at_shard = shard_bytes > worker_bytes;
  plan.network_seconds = std::max(shard_bytes, worker_bytes) * 8 / (input.network_gbps * 1e9);
  if (input.device_tflops <= 0) return;
  plan.shard_seconds = busiest_flops / (input.device_tflops * 1e12);
  if (!WorkersPrecondition(input.spec)) return;
  const bool replays = input.spec.exchange == ExchangeMode::kReplay;
  const double updates = replays ? plan.update_flops / input.spec.inv_freq : 0;
  plan.worker_seconds = (plan.precondition_flops + updates) / (input.device_tflops * 1e12);
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const PlanInput& input) {
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(input.spec));
  PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(input.spec));
  if (input.network_gbps <= 0 || input.shard_memory_bytes <= 0 || input.threads <= 0 || input.shards < 0 ||
      input.shards > kMaxPlanShards) {
    return absl::InvalidArgumentError("plan: expected a network, memory and threads above 0, and at most 4096 shards");
  }
  Plan plan;
  Session session = {input, methods, {}, EstimateLayers(input.spec, methods)};
  for (uint32_t i = 0; i < input.spec.layers.size(); ++i) {
    const LayerSpec& layer = input.spec.layers[i];
    session.layers.push_back(CostOf(input.spec, methods.of(i), i));
    plan.parameters += layer.d_out * layer.d_in;
    plan.state_bytes += methods.of(i).StateBytes(layer);
    plan.precondition_flops += session.layers.back().precondition_flops;
    plan.update_flops += session.layers.back().update_flops;
  }
  plan.worker = BusiestWorker(input.spec, session.layers);
  const double statistic_steps = 1.0 / input.spec.inv_freq;
  plan.worker_sent = static_cast<double>(plan.worker.gradients_sent) +
                     static_cast<double>(plan.worker.statistics_sent) * statistic_steps;
  plan.worker_received = static_cast<double>(plan.worker.answers_received) +
                         static_cast<double>(plan.worker.factors_received) * statistic_steps;
  plan.shards_by_memory = ShardsByMemory(session, plan.reason);
  const int64_t shards = input.shards > 0 ? input.shards : plan.shards_by_memory;
  if (shards == 0) return plan;
  Placed placed = Place(session, shards);
  plan.shards = std::move(placed.shards);
  if (plan.shards_by_memory > 0) plan.reason = std::move(placed.reason);
  plan.fits = plan.reason.empty();
  AddTimes(input, plan);
  return plan;
}

}  // namespace precondor
