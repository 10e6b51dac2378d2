// SPDX-License-Identifier: Apache-2.0
// How a shard is set up, and the devices that it is given.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/device_group.h"
#include "kernels/methods/method_set.h"
#include "server/core/executor.h"

namespace precondor {

class ShardJournal;

struct ShardOptions {
  std::string advertise_address;
  // That sessions may reserve on each device: states, scratch and staging.
  int64_t capacity_bytes = int64_t{8} << 30;
  int window_steps = 2;                    // steps of one layer that may be open or kept for repetitions
  double max_norm_per_sqrt_element = 1e4;  // statistic vectors with |v| > this * sqrt(d) are OVER_NORM
  MethodFactory make_method = MakeMethod;
  // Statistics still missing this long after their step's gradient was complete are given up by
  // ShardUpkeep::SealOverdue: with `quorum` of the ranks in, the update is made from those, otherwise it is skipped.
  // The default waits.
  absl::Duration statistics_deadline = absl::InfiniteDuration();
  double quorum = 1.0;
  // Where the shard writes down what it needs to come back; borrowed, outlives the executor's last task. Null: nowhere.
  ShardJournal* journal = nullptr;
  uint64_t snapshot_interval_steps = 0;  // between two snapshots; 0: none but those asked for
  // All of the shard's devices, in their order, where there are several: they have the layers together for which
  // Method::Splits. Borrowed, outlives the executors' last task. Null: each layer is on one device.
  DeviceGroup* group = nullptr;
  // Gives freed memory back to the system; called when a session's factors are gone. May be empty.
  std::function<void()> trim_memory;
  absl::Duration quarantine_time = absl::InfiniteDuration();  // after which sessions there are deleted
  bool device_plane = false;                                  // gradients may come in memory of the backend's device
  // Workers that a step has been waiting for so long are named by ShardUpkeep::ReportStragglers.
  absl::Duration slow_worker = absl::InfiniteDuration();
};

// What some of a shard's layers are computed on. Each has its own memory and threads; what is made on one is used on it
// alone, but for the parts of a layer that is split (ShardOptions::group).
struct ShardDevice {
  std::string name;  // for people: "cuda:0"
  Backend& backend;
  Executor& executor;
};

}  // namespace precondor
