// SPDX-License-Identifier: Apache-2.0
// Everything about a run, drawn from its seed before it begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/core/shard/shard.h"
#include "server/recovery/gradient_log.h"
#include "tests/sim/network.h"

namespace precondor::sim {

struct FaultKind;

// One thing done to the cluster. The same fault at the same time does the same.
struct PlannedFault {
  int64_t at_us = 0;
  const FaultKind* kind = nullptr;
};

// A bug that the run has on purpose, at a seam between core and the world, to show that an invariant notices it.
enum class PlantedBug : uint8_t {
  kNone,
  kRepetition,  // a shard acknowledges a repetition as taken in
  kUpdate,      // a layer's factors take each update in twice
  kSeal,        // with a rank's contribution an abstention of the next rank arrives, which has not sent it
  kLease,       // a change of mode reaches the ranks above 0 a step early
  kFence,       // contributions of an epoch that has ended arrive as those of the present one
  kChecksum,    // a wrong bit on a shard's disk has a checksum that fits
};

struct Scenario {
  uint64_t seed = 0;
  SessionSpec spec;
  int shards = 1;
  uint64_t steps = 0;
  uint64_t lease_steps = 64;
  int64_t max_delay_us = 1;
  NetworkFaults network;
  double control_loss = 0;    // chance that a coordinator's call to a shard fails on either way
  double disk_failure = 0;    // chance that a write of the coordinator's journal fails
  double trouble = 0;         // see Oracle
  double impatience = 0;      // chance at each heartbeat that a worker goes on without its report's answer
  uint64_t credit_bytes = 0;  // of a worker's stream to a shard
  bool repeatable = false;    // see Oracle
  bool learns = false;        // the method learns from gradients
  bool forgets = false;       // shards come back with empty disks
  bool meets = false;         // shards and ranks are lost: perhaps no process can complete a step
  uint64_t snapshot_interval_steps = 0;
  int window_steps = 2;
  recovery::GradientLogOptions gradient_journal;
  std::vector<PlannedFault> faults;  // by time
  int64_t horizon_us = 0;            // the last fault is over by then
  PlantedBug bug = PlantedBug::kNone;
};

// Quiet for a seed in eight. Faults are of the first `kinds` in their table.
Scenario MakeScenario(uint64_t seed, PlantedBug bug, size_t kinds);

std::string Describe(const Scenario& scenario);

}  // namespace precondor::sim
