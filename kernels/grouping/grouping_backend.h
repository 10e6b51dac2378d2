// SPDX-License-Identifier: Apache-2.0
// A backend that runs the operations of many tasks (Backend::Task) together: what their next operations have in common
// is one call of the device's backend (Backend::Run), so that a step of many layers costs a device few launches.
//
// The operations of a task are deferred until it needs something from the device or ends. A task on a fiber
// (kernels/base/fiber.h) moves to the backend's own threads for its duration (kernels/grouping/device_driver.h): there
// each task runs until it waits, and then the operations of all that wait run: always those of one kind that are next
// in their tasks and do not depend on each other, first of the task that has most left. A task on a thread's own stack
// waits for no other: its operations run on that thread. Which tasks run together is a matter of timing; results are
// the same to the bit. Outside of tasks calls go straight to the device's backend.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/backend.h"

namespace precondor {

struct GroupingOptions {
  // Bytes that a task frees while deferred operations still use them: beyond so many, the operations run. This scratch
  // comes on top of what methods say they need; so there is a bound for all tasks together, too.
  int64_t most_freed_bytes = int64_t{8} << 20;
  int64_t most_freed_bytes_in_all = int64_t{256} << 20;
  // That run tasks side by side between the calls of the device's backend, which one of them makes.
  int threads = 1;
  // How many tasks must have come before the backend's thread begins any, when it has none. More than 1 is for tests
  // and benchmarks that count launches: they never end where fewer tasks come.
  int64_t tasks_at_start = 1;
};

// Thread-safe as Backend says. After the failure of a deferred operation
// every call returns it; when it was memory that was missing, only after what the device had kept was given back.
std::unique_ptr<Backend> MakeGroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options);

}  // namespace precondor
