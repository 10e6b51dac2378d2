// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/tools/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/session_memory.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/method_set.h"

namespace precondor {
namespace {

constexpr int64_t kFloat = 4, kDouble = 8;
constexpr int64_t kWindowSteps = 2;  // the servers' default of --window-steps

// What the plan needs to know about a layer.
struct LayerCost {
  int64_t statistics = 0;  // bytes that one worker sends at a statistic step
  int64_t factors = 0;     // bytes that one worker receives at a statistic step
  int64_t gradient = 0;    // bytes of one gradient on the wire; 0 if gradients stay with the workers
  int64_t states = 0;
  int64_t staging = 0;
  // Bytes of scratch. A shard that works on few layers at once reserves the largest of each part for each of them.
  int64_t statistics_scratch = 0;
  int64_t gradient_scratch = 0;
  int64_t method_scratch = 0;
  double precondition_flops = 0;
  double update_flops = 0;
  double cost() const { return precondition_flops + update_flops; }
};

int64_t SumOfSides(const LayerSpec& layer) { return layer.d_in + layer.d_out; }

// Returns the number of elements of all workers' statistics, merged. For COVARIANCE it includes what merging takes for
// the wider side: a contribution as sent, the contribution unpacked, and the sum.
int64_t MergedElements(const SessionSpec& spec, int64_t index) {
  const LayerSpec& layer = spec.layers[static_cast<size_t>(index)];
  if (StatisticsOf(spec, index) != StatisticsKind::kCovariance) return VectorsPerStep(spec, index) * SumOfSides(layer);
  const int64_t widest = std::max(layer.d_in, layer.d_out);
  return StatisticsElements(spec, index) + PackedElements(widest) + 2 * widest * widest;
}

int64_t GradientRanks(const SessionSpec& spec) {
  return spec.exchange == ExchangeMode::kDelegate ? 1 : spec.world_size;
}

// Returns the number of whole gradients of a layer that its shard receives in a step.
int64_t GradientCopies(const SessionSpec& spec) { return spec.exchange == ExchangeMode::kDirect ? spec.world_size : 1; }

// Returns the bytes that server/core reserves to stage a layer: statistics of one step more than the window has;
// gradients, and their f64 sums if several ranks send them, or in SHARDED the joined one and its parts; and in REPLAY
// and PULL_FACTORS what workers receive, and two saved states.
int64_t Staging(const SessionSpec& spec, const Method& method, int64_t index, const LayerCost& cost) {
  const LayerSpec& layer = spec.layers[static_cast<size_t>(index)];
  const int64_t ranks = GradientRanks(spec);
  const int64_t slots = (spec.world_size + ranks) * kPlanBytesPerContribution;
  int64_t bytes = (kWindowSteps + 1) * (spec.world_size * cost.statistics + slots);
  if (cost.gradient > 0) {
    const bool sharded = spec.exchange == ExchangeMode::kSharded;
    const int64_t sums = !sharded && ranks > 1 ? layer.d_out * layer.d_in * kDouble : 0;
    bytes += kWindowSteps * ((sharded ? 4 : ranks) * cost.gradient + sums);
  }
  if (cost.factors > 0) bytes += kWindowSteps * cost.factors + 2 * method.SavedBytes(layer);
  return bytes + LayerTableBytes(spec, layer, ranks);
}

LayerCost CostOf(const SessionSpec& spec, const Method& method, int64_t index) {
  const LayerSpec& layer = spec.layers[static_cast<size_t>(index)];
  const int64_t elements = layer.d_out * layer.d_in;
  const int64_t vectors = VectorsPerStep(spec, index);
  LayerCost cost;
  cost.states = method.StateBytes(layer);
  if (method.needs_statistics()) {
    cost.statistics = StatisticsElements(spec, index) * static_cast<int64_t>(ByteSize(spec.statistics_dtype));
    // On the host: one worker's decoded statistics, for vectors all workers', and for MEAN the sums of means in f64 and
    // the means.
    const StatisticsKind kind = StatisticsOf(spec, index);
    const int64_t host = kind == StatisticsKind::kMean         ? 3 * SumOfSides(layer)
                         : kind == StatisticsKind::kCovariance ? StatisticsElements(spec, index)
                                                               : vectors * SumOfSides(layer);
    cost.statistics_scratch = (MergedElements(spec, index) + host) * kFloat;
    if (spec.exchange == ExchangeMode::kReplay) cost.factors = MergedElements(spec, index) * kFloat;
    if (spec.exchange == ExchangeMode::kPullFactors) cost.factors = method.SavedBytes(layer);
  }
  if (!WorkersPrecondition(spec)) {
    cost.gradient = elements * static_cast<int64_t>(ByteSize(spec.gradient_dtype));
    // D and U on the device, and D on the host if the wire type is not f32.
    cost.gradient_scratch = (spec.gradient_dtype == DType::kF32 ? 2 : 3) * elements * kFloat;
  }
  cost.method_scratch = method.ScratchBytes(layer, vectors) + method.DeferredScratchBytes(layer);
  cost.staging = Staging(spec, method, index, cost);
  // StepFlops grows linearly with the number of vectors of an update. For 0 vectors it counts the preconditioning, the
  // decompositions spread over their interval, and what a method without statistics learns from every gradient.
  cost.precondition_flops = method.StepFlops(layer, 0);
  cost.update_flops = std::max(0.0, method.StepFlops(layer, vectors) - cost.precondition_flops);
  return cost;
}

int64_t Scratch(const std::vector<const LayerCost*>& layers, int64_t threads) {
  int64_t all = 0, statistics = 0, gradient = 0, method = 0;
  for (const LayerCost* layer : layers) {
    all += layer->statistics_scratch + layer->gradient_scratch + layer->method_scratch;
    statistics = std::max(statistics, layer->statistics_scratch);
    gradient = std::max(gradient, layer->gradient_scratch);
    method = std::max(method, layer->method_scratch);
  }
  const bool all_at_once = static_cast<int64_t>(layers.size()) <= threads;
  return all_at_once ? all : threads * (statistics + gradient + method);
}

struct Placed {
  std::vector<ShardLoad> shards;
  std::string reason;  // empty if the shards hold all layers; all layers are placed in either case
};

// Places layers like server/policy/placement.h: in the order of descending cost, each on the least loaded shard with
// room for its state and staging. Ties go to the lower layer and the lower shard. Then adds the scratch that each shard
// reserves.
Placed Place(const PlanInput& input, const std::vector<LayerCost>& layers, int64_t shards) {
  std::vector<size_t> order(layers.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return layers[x].cost() > layers[y].cost(); });
  Placed placed;
  placed.shards.resize(static_cast<size_t>(shards));
  std::vector<std::vector<const LayerCost*>> of_shard(placed.shards.size());
  for (const size_t index : order) {
    const LayerCost& layer = layers[index];
    const auto needs = layer.states + layer.staging;
    size_t best = placed.shards.size(), least = 0;
    for (size_t s = 0; s < placed.shards.size(); ++s) {
      const ShardLoad& shard = placed.shards[s];
      if (shard.cost < placed.shards[least].cost) least = s;
      if (shard.states + shard.staging + needs > input.shard_memory_bytes) continue;
      if (best == placed.shards.size() || shard.cost < placed.shards[best].cost) best = s;
    }
    if (best == placed.shards.size()) {
      if (placed.reason.empty()) {
        placed.reason = absl::StrCat("layer ", index, " \"", input.spec.layers[index].name, "\" needs ", needs,
                                     " bytes of state and staging; none of ", shards, " shards has so much left of ",
                                     input.shard_memory_bytes);
      }
      best = least;  // continues, so that the plan shows what the shards would need
    }
    ShardLoad& shard = placed.shards[best];
    const double workers = input.spec.world_size, copies = static_cast<double>(GradientCopies(input.spec));
    const double statistic_steps = 1.0 / input.spec.inv_freq;  // in an average step
    ++shard.layers;
    shard.states += layer.states;
    shard.staging += layer.staging;
    shard.cost += layer.cost();
    shard.received += workers * static_cast<double>(layer.statistics) * statistic_steps +
                      copies * static_cast<double>(layer.gradient);
    shard.sent +=
        workers * static_cast<double>(layer.factors) * statistic_steps + copies * static_cast<double>(layer.gradient);
    shard.step_flops += layer.update_flops * statistic_steps;
    if (!WorkersPrecondition(input.spec)) shard.step_flops += layer.precondition_flops;
    of_shard[best].push_back(&layer);
  }
  for (size_t s = 0; s < of_shard.size(); ++s) {
    ShardLoad& shard = placed.shards[s];
    shard.scratch = Scratch(of_shard[s], input.threads);
    if (shard.layers > 0) shard.staging += SessionTableBytes(input.spec);
    if (shard.reserved() <= input.shard_memory_bytes || !placed.reason.empty()) continue;
    placed.reason = absl::StrCat("shard ", s, " of ", shards, " needs ", shard.reserved(), " bytes, ", shard.scratch,
                                 " of them scratch; it has ", input.shard_memory_bytes);
  }
  return placed;
}

// Returns the fewest shards that hold all layers, or 0 and the reason if kMaxPlanShards shards are too few.
int64_t ShardsByMemory(const PlanInput& input, const std::vector<LayerCost>& layers, std::string& reason) {
  double total = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerCost& layer = layers[i];
    const int64_t alone =
        layer.states + layer.staging + Scratch({&layer}, input.threads) + SessionTableBytes(input.spec);
    if (alone > input.shard_memory_bytes) {
      reason = absl::StrCat("layer ", i, " \"", input.spec.layers[i].name, "\" needs ", alone,
                            " bytes by itself; a shard has ", input.shard_memory_bytes);
      return 0;
    }
    total += static_cast<double>(layer.states + layer.staging);
  }
  const auto at_least = static_cast<int64_t>(total / static_cast<double>(input.shard_memory_bytes));
  for (int64_t shards = std::max<int64_t>(1, at_least); shards <= kMaxPlanShards; ++shards) {
    if (Place(input, layers, shards).reason.empty()) return shards;
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
  std::vector<LayerCost> layers;
  for (size_t i = 0; i < input.spec.layers.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    layers.push_back(CostOf(input.spec, methods.of(index), index));
    plan.parameters += input.spec.layers[i].d_out * input.spec.layers[i].d_in;
    plan.state_bytes += layers.back().states;
    plan.precondition_flops += layers.back().precondition_flops;
    plan.update_flops += layers.back().update_flops;
  }
  plan.worker = BusiestWorker(input.spec, layers);
  const double statistic_steps = 1.0 / input.spec.inv_freq;
  plan.worker_sent = static_cast<double>(plan.worker.gradients_sent) +
                     static_cast<double>(plan.worker.statistics_sent) * statistic_steps;
  plan.worker_received = static_cast<double>(plan.worker.answers_received) +
                         static_cast<double>(plan.worker.factors_received) * statistic_steps;
  plan.shards_by_memory = ShardsByMemory(input, layers, plan.reason);
  const int64_t shards = input.shards > 0 ? input.shards : plan.shards_by_memory;
  if (shards == 0) return plan;
  Placed placed = Place(input, layers, shards);
  plan.shards = std::move(placed.shards);
  if (plan.shards_by_memory > 0) plan.reason = std::move(placed.reason);
  plan.fits = plan.reason.empty();
  AddTimes(input, plan);
  return plan;
}

}  // namespace precondor
