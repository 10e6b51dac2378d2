// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/scenario.h"

#include <algorithm>

#include "tests/sim/fault_kinds.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {
namespace {

SessionSpec MakeSpec(Random& random) {
  SessionSpec spec;
  spec.name = "sim";
  spec.world_size = static_cast<int32_t>(random.Between(1, 5));
  spec.exchange = random.Chance(0.6) ? ExchangeMode::kDirect : ExchangeMode::kDelegate;
  spec.sketches = static_cast<int32_t>(random.Between(1, 2));
  spec.inv_freq = static_cast<int32_t>(random.Between(1, 4));
  spec.warmup_steps = static_cast<int32_t>(random.Between(0, 3));
  random.Between(0, 1);  // unused, like another draw below: kFoundSeeds rely on the draws after it
  spec.statistics_dtype = DType::kF32;
  const int64_t layers = random.Between(1, 3);
  for (int64_t i = 0; i < layers; ++i) {
    spec.layers.push_back({.name = "layer" + std::to_string(i),
                           .d_out = random.Between(1, 3),
                           .d_in = random.Between(1, 3),
                           .has_bias = false});
  }
  return spec;
}

FallbackConfig MakeFallback(Random& random) {
  FallbackConfig config;
  switch (random.Below(4)) {
    case 0:
      config.policy = FallbackPolicy::kAtStep;
      config.at_step = random.Below(12);
      return config;
    case 1:
      config.policy = FallbackPolicy::kLossRate;
      config.rate_decay = 0.5;
      config.min_steps = 2;
      config.beta = 0.5;
      config.patience_steps = 1;
      random.Chance(0.5);  // a draw of an option that is gone: what seeds have found stays found
      return config;
    default:
      return config;
  }
}

void DrawFaults(Random& random, size_t kinds, Scenario& scenario) {
  scenario.network.drop = 0.01 * static_cast<double>(random.Below(20));
  scenario.network.duplicate = 0.01 * static_cast<double>(random.Below(30));
  scenario.network.straggle = 0.01 * static_cast<double>(random.Below(10));
  scenario.control_loss = random.Chance(0.5) ? 0.2 : 0;
  scenario.disk_failure = random.Chance(0.3) ? 0.2 : 0;
  scenario.horizon_us = random.Between(20, 300) * 1000;
  // Few kinds in one run, so that rare meetings are not drowned by frequent ones.
  using Loses = FaultKind::Loses;
  // Not both: what a shard had gathered and the rank that would send it again (docs/develop/testing.md).
  const Loses spared = random.Chance(0.5) ? Loses::kRank : Loses::kShard;
  for (const FaultKind& kind : FaultKinds().first(std::min(kinds, FaultKinds().size()))) {
    if (kind.loses == spared || !random.Chance(0.3)) continue;
    const int64_t count = random.Between(1, 3);
    for (int64_t i = 0; i < count; ++i) {
      scenario.repeatable = scenario.repeatable || kind.loses == Loses::kShard;
      scenario.faults.push_back({.at_us = random.Between(0, scenario.horizon_us), .kind = &kind});
    }
  }
}

// Shards that come back with empty disks. No rank is lost, and no other shard forgets anything.
void DrawForgetting(Random& random, Scenario& scenario) {
  using Loses = FaultKind::Loses;
  std::vector<PlannedFault>& faults = scenario.faults;
  const bool may = scenario.spec.exchange == ExchangeMode::kDelegate && scenario.shards > 1 && scenario.horizon_us > 0;
  const bool ranks = std::any_of(faults.begin(), faults.end(),
                                 [](const PlannedFault& fault) { return fault.kind->loses == Loses::kRank; });
  if (!may || ranks || !random.Chance(0.7)) return;
  scenario.forgets = scenario.repeatable = true;
  std::erase_if(faults, [](const PlannedFault& fault) { return fault.kind->loses == Loses::kShard; });
  for (int64_t i = random.Between(1, 3); i > 0; --i) {
    faults.push_back({.at_us = random.Between(0, scenario.horizon_us), .kind = &ForgetsAShard()});
  }
}

// Both, then: what a shard had gathered, and the rank that would send it again. Not a trainer that goes back as well:
// how far the job was is among what the shard may lose.
void DrawRendezvous(Random& random, Scenario& scenario) {
  using Loses = FaultKind::Loses;
  std::vector<PlannedFault>& faults = scenario.faults;
  const auto goes_back = [](const FaultKind& kind) { return std::string(kind.name) == "roll_back_rank"; };
  const bool may =
      !scenario.forgets && !faults.empty() &&
      std::none_of(faults.begin(), faults.end(), [&](const auto& fault) { return goes_back(*fault.kind); });
  if (!may || !random.Chance(0.3)) return;
  std::vector<const FaultKind*> losing;
  for (const FaultKind& kind : FaultKinds()) {
    if (kind.loses != Loses::kNothing && !goes_back(kind)) losing.push_back(&kind);
  }
  for (int64_t i = random.Between(1, 3); i > 0; --i) {
    faults.push_back({.at_us = random.Between(0, scenario.horizon_us), .kind = losing[random.Below(losing.size())]});
  }
  scenario.repeatable = scenario.meets = true;
}

// Workers that have the factors themselves: they can neither lag behind nor do without a shard.
void DrawWorkersWithFactors(Random& random, Scenario& scenario) {
  if (scenario.forgets || !random.Chance(0.4)) return;
  scenario.spec.exchange = random.Chance(0.5) ? ExchangeMode::kReplay : ExchangeMode::kPullFactors;
}

// Gradients of which each rank has a part.
void DrawParts(Random& random, Scenario& scenario) {
  if (scenario.spec.exchange == ExchangeMode::kDirect && random.Chance(0.4)) {
    scenario.spec.exchange = ExchangeMode::kSharded;
  }
}

// A method that learns from gradients, with or without a journal of them. It knows no first order, and no worker has
// its factors.
void DrawLearning(Random& random, Scenario& scenario) {
  if (!random.Chance(0.5)) return;
  scenario.learns = true;
  scenario.spec.fallback = {};
  std::erase_if(scenario.faults, [](const PlannedFault& fault) { return std::string(fault.kind->name) == "set_mode"; });
  if (WorkersPrecondition(scenario.spec)) scenario.spec.exchange = ExchangeMode::kDirect;
  recovery::GradientLogOptions& journal = scenario.gradient_journal;
  const uint64_t kind = random.Below(5);
  if (kind == 0) journal.snapshot_bytes = 0;
  if (kind == 1) journal.state_multiple = 1, journal.snapshot_bytes = 1 + random.Below(1000);
  if (kind == 2) journal.backlog_bytes = random.Below(500);
}

// Shards that are told to end, and that die amid their work. As in DrawFaults, ranks then lose nothing.
void DrawEnds(Random& random, Scenario& scenario) {
  using Loses = FaultKind::Loses;
  std::vector<PlannedFault>& faults = scenario.faults;
  const bool ranks = std::any_of(faults.begin(), faults.end(),
                                 [](const PlannedFault& fault) { return fault.kind->loses == Loses::kRank; });
  if (scenario.horizon_us == 0 || (ranks && !scenario.meets) || scenario.forgets) return;
  for (const FaultKind* kind : {&DrainsAShard(), &KillsAShardThatWrites()}) {
    if (!random.Chance(0.3)) continue;
    for (int64_t i = random.Between(1, 3); i > 0; --i) {
      faults.push_back({.at_us = random.Between(0, scenario.horizon_us), .kind = kind});
      scenario.repeatable = true;
    }
  }
}

}  // namespace

Scenario MakeScenario(uint64_t seed, PlantedBug bug, size_t kinds) {
  Random random(seed ^ 0x5ce0a210);
  Scenario scenario;
  scenario.seed = seed;
  scenario.bug = bug;
  scenario.spec = MakeSpec(random);
  scenario.spec.fallback = MakeFallback(random);
  scenario.shards = static_cast<int>(random.Between(1, 3));
  scenario.steps = static_cast<uint64_t>(random.Between(6, 20));
  scenario.lease_steps = static_cast<uint64_t>(random.Between(1, 6));
  scenario.max_delay_us = random.Between(1, 2000);
  scenario.trouble = random.Chance(0.4) ? 0.05 : 0;
  scenario.impatience = random.Chance(0.5) ? 0.5 : 0;
  scenario.window_steps = static_cast<int>(random.Between(2, 3));
  scenario.snapshot_interval_steps = random.Below(5);
  if (random.Chance(0.2)) random.Between(5, 50);
  if (!random.Chance(0.125)) DrawFaults(random, kinds, scenario);
  // Down to where payloads wait for each other's acknowledgements.
  scenario.credit_bytes = random.Chance(0.5) ? 1 << 20 : static_cast<uint64_t>(random.Between(1, 100));
  if (kinds > FaultKinds().size()) DrawForgetting(random, scenario);
  if (kinds > FaultKinds().size() + 1) DrawRendezvous(random, scenario);
  if (kinds > FaultKinds().size() + 2) DrawWorkersWithFactors(random, scenario);
  if (kinds > FaultKinds().size() + 3) DrawParts(random, scenario);
  if (kinds > FaultKinds().size() + 4) DrawLearning(random, scenario);
  if (kinds > FaultKinds().size() + 5) DrawEnds(random, scenario);
  std::stable_sort(scenario.faults.begin(), scenario.faults.end(),
                   [](const PlannedFault& x, const PlannedFault& y) { return x.at_us < y.at_us; });
  return scenario;
}

std::string Describe(const Scenario& scenario) {
  const recovery::GradientLogOptions& journal = scenario.gradient_journal;
  const std::string learns = "gradients, journalled up to " + std::to_string(journal.snapshot_bytes) + ", backlog " +
                             std::to_string(journal.backlog_bytes);
  std::string text =
      "seed " + std::to_string(scenario.seed) + ": " + std::string(ExchangeModeName(scenario.spec.exchange)) + ", " +
      std::to_string(scenario.spec.world_size) + " workers, " + std::to_string(scenario.shards) + " shards, " +
      std::to_string(scenario.spec.layers.size()) + " layers, " + std::to_string(scenario.steps) + " steps, " +
      (scenario.learns ? learns : "statistics") + ", lease " + std::to_string(scenario.lease_steps) + "; faults:";
  for (const PlannedFault& fault : scenario.faults) {
    text += " " + std::string(fault.kind->name) + "@" + std::to_string(fault.at_us);
  }
  return text;
}

}  // namespace precondor::sim
