// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/fault_kinds.h"

#include <functional>
#include <utility>
#include <vector>

#include "tests/sim/world.h"

namespace precondor::sim {
namespace {

using Link = std::pair<Process*, Process*>;

// Short against the run, or longer than every timeout in it.
int64_t SomeTime(World& world) {
  return world.random().Chance(0.5) ? world.random().Between(100, 10'000) : world.random().Between(10'000, 80'000);
}

SimShard& SomeShard(World& world) { return *world.shards()[world.random().Below(world.shards().size())]; }

uint32_t SomeRank(World& world) { return static_cast<uint32_t>(world.random().Below(world.ranks())); }

Process& SomeProcess(World& world) {
  const std::vector<Process*> all = world.Processes();
  return *all[world.random().Below(all.size())];
}

// --- processes ------------------------------------------------------------------------------------------------------

// Killed, and started again from its last checkpoint.
void RestartRank(World& world) { world.RestartRank(SomeRank(world), /*back=*/0, SomeTime(world)); }

// A trainer that is started again from an earlier checkpoint.
void RollBackRank(World& world) {
  world.RestartRank(SomeRank(world), /*back=*/1 + world.random().Below(5), SomeTime(world));
}

// The whole job is preempted and comes back, each rank from its own last checkpoint.
void RestartJob(World& world) {
  for (uint32_t rank = 0; rank < world.ranks(); ++rank) world.RestartRank(rank, /*back=*/0, SomeTime(world));
}

void PauseSomething(World& world) {
  Process& process = SomeProcess(world);
  process.Pause();
  world.trace().Note([&] { return "pause " + process.name(); });
  world.queue().After(SomeTime(world), [&process, life = process.life()] {
    if (process.life() == life) process.Resume();
  });
}

void CrashCoordinator(World& world) {
  const int64_t patience_us = world.random().Between(1, 10'000);
  world.coordinator().DieAfter(world.random().Below(8), patience_us);
  world.queue().After(patience_us + SomeTime(world), [&world] { world.RestartCoordinator(); });
}

// A shard comes back from its log and snapshots with all that it has told another process.
void KillShard(World& world) { SomeShard(world).Kill(Loss::kProcess, SomeTime(world)); }

// A server that is told to end, and started again.
void DrainShard(World& world) {
  const int64_t patience_us = world.random().Between(0, 20'000);
  SomeShard(world).Drain(patience_us, SomeTime(world));
}

void KillShardThatWrites(World& world) {
  const uint64_t writes = 1 + world.random().Below(8);
  SomeShard(world).KillAfterWrites(writes, SomeTime(world));
}

// A shard comes back with an empty disk.
void ForgetShard(World& world) { SomeShard(world).Forget(SomeTime(world)); }

// Its machine dies: what was not synced is gone, or torn.
void CrashShardMachine(World& world) { SomeShard(world).Kill(Loss::kMachine, SomeTime(world)); }

// And the disk has rotted: damage is noticed, and then the shard begins with an empty one.
void RotShardDisk(World& world) { SomeShard(world).Kill(Loss::kMachineAndBit, SomeTime(world)); }

// --- links ----------------------------------------------------------------------------------------------------------

void ClogFor(World& world, const Link& link, int64_t time_us) {
  world.network().Clog(*link.first, *link.second);
  world.trace().Note([&] { return "clog " + link.first->name() + " to " + link.second->name(); });
  world.queue().After(time_us, [&world, link] { world.network().Unclog(*link.first, *link.second); });
}

// One process and the rest do not hear each other.
void Partition(World& world) {
  Process& lonely = SomeProcess(world);
  const int64_t time_us = SomeTime(world);
  for (Process* other : world.Processes()) {
    if (other == &lonely) continue;
    ClogFor(world, {&lonely, other}, time_us);
    ClogFor(world, {other, &lonely}, time_us);
  }
}

void ClogOneWay(World& world) {
  Process& from = SomeProcess(world);
  Process& to = SomeProcess(world);
  if (&from != &to) ClogFor(world, {&from, &to}, SomeTime(world));
}

// A random half of all links, clogged one by one and freed in another order.
void Swizzle(World& world) {
  std::vector<Link> links;
  for (Process* from : world.Processes()) {
    for (Process* to : world.Processes()) {
      if (from != to && world.random().Chance(0.5)) links.push_back({from, to});
    }
  }
  const int64_t step_us = world.random().Between(100, 3000);
  const int64_t count = static_cast<int64_t>(links.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t until_us = world.random().Between(count, 2 * count) * step_us;
    world.queue().After(i * step_us, [&world, link = links[i], left_us = until_us - i * step_us] {
      if (!world.healed()) ClogFor(world, link, left_us);
    });
  }
}

// --- machines -------------------------------------------------------------------------------------------------------

void FillDisk(World& world) {
  world.coordinator().journal().set_full(true);
  world.trace().Note([] { return "the coordinator's disk is full"; });
  world.queue().After(SomeTime(world), [&world] { world.coordinator().journal().set_full(false); });
}

void HurtShardDisk(World& world, const char* how, const std::function<void(SimShardDisk&)>& hurt) {
  SimShard& shard = SomeShard(world);
  hurt(shard.disk());
  world.trace().Note([&] { return "the disk of " + shard.process().name() + " " + how; });
  world.queue().After(SomeTime(world), [&shard] { shard.disk().Mend(); });
}

void FillShardDisk(World& world) {
  HurtShardDisk(world, "is full", [&](SimShardDisk& disk) { disk.Fill(world.random().Below(3000)); });
}

void FailShardDisk(World& world) {
  HurtShardDisk(world, "fails", [&](SimShardDisk& disk) { disk.Fail(0.3); });
}

void SlowShardDisk(World& world) {
  HurtShardDisk(world, "is slow", [&](SimShardDisk& disk) { disk.SlowDown(world.random().Between(1, 5000)); });
}

void JumpClock(World& world) {
  const int64_t by_us = world.random().Between(-900'000'000, 900'000'000);
  if (world.random().Chance(0.5)) {
    world.coordinator().clock().Jump(by_us);
  } else {
    SomeShard(world).clock().Jump(by_us);
  }
  world.trace().Note([&] { return "a clock jumps by " + std::to_string(by_us); });
}

// --- people ---------------------------------------------------------------------------------------------------------

void SetMode(World& world) {
  std::optional<Mode> mode;
  if (world.random().Chance(0.8)) mode = world.random().Chance(0.5) ? Mode::kFirstOrder : Mode::kSecondOrder;
  world.AskForMode(mode);
}

using Loses = FaultKind::Loses;
constexpr FaultKind kFaultKinds[] = {
    {"restart_rank", RestartRank, Loses::kRank},
    {"roll_back_rank", RollBackRank, Loses::kRank},
    {"restart_job", RestartJob, Loses::kRank},
    {"kill_shard", KillShard, Loses::kShard},
    {"crash_shard_machine", CrashShardMachine, Loses::kShard},
    {"rot_shard_disk", RotShardDisk, Loses::kShard},
    {"crash_coordinator", CrashCoordinator},
    {"pause", PauseSomething},
    {"partition", Partition},
    {"clog_one_way", ClogOneWay},
    {"swizzle", Swizzle},
    {"fill_disk", FillDisk},
    {"jump_clock", JumpClock},
    {"set_mode", SetMode},
    {"fill_shard_disk", FillShardDisk},
    {"fail_shard_disk", FailShardDisk},
    {"slow_shard_disk", SlowShardDisk},
};

}  // namespace

absl::Span<const FaultKind> FaultKinds() { return kFaultKinds; }

const FaultKind& ForgetsAShard() {
  static constexpr FaultKind kForgetShard = {"forget_shard", ForgetShard, Loses::kShard};
  return kForgetShard;
}

const FaultKind& DrainsAShard() {
  static constexpr FaultKind kDrainShard = {"drain_shard", DrainShard, Loses::kShard};
  return kDrainShard;
}

const FaultKind& KillsAShardThatWrites() {
  static constexpr FaultKind kKillShard = {"kill_shard_that_writes", KillShardThatWrites, Loses::kShard};
  return kKillShard;
}

}  // namespace precondor::sim
