// SPDX-License-Identifier: Apache-2.0
// Plans a session before it is opened: memory, bytes, arithmetic and seconds a step, and the number of shards. Pure
// functions. State, scratch and arithmetic are the methods' own figures, by which servers also reserve memory and place
// layers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"

namespace precondor {

struct PlanInput {
  SessionSpec spec;         // with its layers
  double network_gbps = 0;  // 1e9 bits a second of each machine, in each direction
  // 1e12 operations a second that shards and workers reach; 0 means that the plan has no seconds of arithmetic
  double device_tflops = 0;
  int64_t shard_memory_bytes = 0;
  int64_t shards = 0;     // 0 means as few as memory allows
  int64_t threads = 512;  // layers that a shard works on at once; 512 is a CUDA device's default
};

// Payload bytes of one worker. Headers and acknowledgements are not included.
struct WorkerTraffic {
  int64_t statistics_sent = 0;   // at a statistic step
  int64_t factors_received = 0;  // at a statistic step: merged vectors in REPLAY, at most this in PULL_FACTORS
  int64_t gradients_sent = 0;    // in each step
  int64_t answers_received = 0;  // each step: preconditioned gradients
};

struct ShardLoad {
  int64_t layers = 0;
  // Bytes that the shard reserves.
  int64_t states = 0;
  int64_t staging = 0;
  int64_t scratch = 0;
  // Payload bytes of all workers in an average step.
  double received = 0;
  double sent = 0;
  double cost = 0;  // operations, by which layers are placed
  // Operations in an average step.
  double step_flops = 0;
  int64_t reserved() const { return states + staging + scratch; }
};

struct Plan {
  int64_t parameters = 0;
  int64_t state_bytes = 0;  // largest size of the factors of all layers
  WorkerTraffic worker;     // of the worker that moves most
  double worker_sent = 0;   // bytes in an average step, which has 1 / inv_freq statistic steps
  double worker_received = 0;
  // 2 m n (m + n) for a layer [m, n] with dense factors and 8 r m n with factors of rank r, summed over layers.
  double precondition_flops = 0;  // in each step
  double update_flops = 0;        // in a statistic step
  std::vector<ShardLoad> shards;  // if the session does not fit, as if memory had no limit
  // Fewest shards that hold the session; 0 if a layer fits no shard, or more than kMaxPlanShards are needed.
  int64_t shards_by_memory = 0;
  bool fits = false;              // whether `shards` hold the session
  std::string reason;             // if it does not fit: why, with the numbers
  double imbalance = 0;           // cost of the busiest shard over the mean; 1 is even
  double network_seconds = 0;     // in an average step, at the busiest end; without overlap with computation
  bool network_at_shard = false;  // whether that end is a shard
  // In an average step at device_tflops: of the busiest shard, and of a worker if workers precondition.
  double shard_seconds = 0;
  double worker_seconds = 0;
};

// Makes a plan. Places layers like the coordinator, on shards of one device that hold nothing else. Returns
// InvalidArgument if a number is out of range, and the errors of ValidateSessionSpec and of the options of the method
// (InvalidArgument or NotFound).
absl::StatusOr<Plan> MakePlan(const PlanInput& input);

// Largest number of shards that a plan considers.
inline constexpr int64_t kMaxPlanShards = 4096;

}  // namespace precondor
