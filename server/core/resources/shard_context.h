// SPDX-License-Identifier: Apache-2.0
// Options and device of a shard, and the state that its sessions share. It is held by shared_ptr because work on an
// executor can outlive the shard.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/methods/registry.h"
#include "server/core/api/executor.h"
#include "server/core/api/observer.h"
#include "server/core/api/shard_control.h"
#include "server/core/resources/memory_account.h"

namespace precondor {

class ShardJournal;

struct ShardOptions {
  std::string advertise_address;
  std::string device_name;  // for people, such as "cuda:0"; empty: the backend's name
  // Bytes that sessions may reserve for states, scratch and staging.
  int64_t capacity_bytes = int64_t{8} << 30;
  int window_steps = 2;                    // steps of a layer that may be open or kept for repetitions
  double max_norm_per_sqrt_element = 1e4;  // statistic vectors with |v| > this * sqrt(d) are OVER_NORM
  MethodFactory make_method = MakeMethod;
  // The shard's journal, or null for none. Borrowed; must outlive the executor's last task.
  ShardJournal* journal = nullptr;
  uint64_t snapshot_interval_steps = 0;  // between two snapshots; 0: only those requested
  // How long a session stays in quarantine before the shard deletes it.
  absl::Duration quarantine_time = absl::InfiniteDuration();
  std::string ring_device;  // DevicePlane::device of the device, in whose memory gradients may be; empty: none
  // ShardUpkeep::ReportStragglers names the workers that a step has been waiting for longer than this.
  absl::Duration slow_worker = absl::InfiniteDuration();
};

// One per shard. The referenced objects must outlive the executor's last task.
struct ShardContext {
  ShardOptions options;
  Backend& backend;
  Executor& executor;
  const Clock& clock;
  Logger& logger;
  LayerObserver& layer_observer;
  ShardObserver& observer;
  MemoryAccount memory;
  std::atomic<int64_t> in_flight = 0;  // unanswered gradients and unfinished updates
};

// Describes the device: reserved bytes, and the fault that made it unusable. Thread-safe.
inline DeviceUse DescribeDevice(const ShardContext& shard) {
  const std::string& name = shard.options.device_name;
  return {.name = name.empty() ? std::string(shard.backend.name()) : name,
          .capacity_bytes = shard.memory.capacity(),
          .reserved_bytes = shard.memory.reserved(),
          .fault = std::string(shard.backend.fault().message()),
          .ring_device = shard.options.ring_device};
}

}  // namespace precondor
