// SPDX-License-Identifier: Apache-2.0
// A backend that runs the operations of many tasks (Backend::Task) together: it combines equal kinds of their next
// operations into one call of the device's backend (Backend::Run), so that a step of many layers needs few launches on
// the device.
//
// The operations of a task are deferred until it needs a result from the device or ends. A task on a fiber
// (kernels/base/fiber.h) moves to the backend's own threads for its duration (kernels/grouping/device_driver.h). There
// each task runs until it waits. Then the operations of all waiting tasks run, group after group: a group has
// operations of one kind that are next in their tasks and do not depend on each other, and its kind is that of the next
// operation of the task with the most operations left. A round waits a short time for tasks that are expected. A task
// on a thread's own stack does not wait for others: its operations run on that thread. Timing decides which tasks run
// together; the results are equal to the bit. Calls outside of tasks go directly to the device's backend.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "absl/time/time.h"

#include "kernels/backend.h"

namespace precondor {

struct GroupingOptions {
  // Bytes that a task may free while deferred operations still use them. Beyond this the operations run. This memory is
  // in addition to the scratch that methods declare, so a second bound holds for all tasks together.
  int64_t most_freed_bytes = int64_t{8} << 20;
  int64_t most_freed_bytes_in_all = int64_t{256} << 20;
  // Number of threads that run tasks concurrently between the calls of the device's backend, which one of them makes.
  int threads = 1;
  // Number of tasks that must have arrived before the backend's threads start any, when they have none. Values above 1
  // are for tests and benchmarks that count launches: these never end if fewer tasks arrive.
  int64_t tasks_at_start = 1;
  // The longest time that a round waits for expected tasks (Backend::ExpectedTask), and the number of tasks that can
  // run at once: while so many wait, no other can come.
  absl::Duration patience = absl::Microseconds(200);
  int64_t most_tasks = std::numeric_limits<int64_t>::max();
};

// Thread-safe as Backend says. After the failure of a deferred operation every call returns that error. If memory was
// lacking, the failure counts only after a retry with the device's cached memory freed.
std::unique_ptr<Backend> MakeGroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options);

}  // namespace precondor
