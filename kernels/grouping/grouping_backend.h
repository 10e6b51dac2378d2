// SPDX-License-Identifier: Apache-2.0
// A backend whose tasks (Backend::Task) run in step with each other: what their next operations have in common is one
// call of the device's backend (Backend::RunTogether), so that a step of many layers costs a device few launches.
//
// Operations of a task are put off until it needs something from the device or ends. It then waits until all other
// tasks wait too, or for `patience`, and the operations of all that wait run: always those of one kind that are next in
// their tasks and do not depend on each other, first of the task that has most left. Which tasks met is a matter of
// timing; results are the same to the bit. Outside of tasks, and for operations that kernels/operation.h does not know,
// calls go straight to the device's backend.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/time/time.h"

#include "kernels/backend.h"

namespace precondor {

struct GroupingOptions {
  // How long a task waits for others that do not; no longer than a few launches would take.
  absl::Duration patience = absl::Microseconds(200);
  // A task runs what it has put off when it has freed so much that these operations still use: scratch that it may hold
  // beyond what methods say they need.
  int64_t most_freed_bytes = int64_t{8} << 20;
};

// Thread-safe as Backend says. Composites have their default form. After the failure of an operation that was put off
// every call returns it; when it was memory that was missing, only after what the device had kept was given back.
std::unique_ptr<Backend> MakeGroupingBackend(std::unique_ptr<Backend> device, const GroupingOptions& options);

}  // namespace precondor
