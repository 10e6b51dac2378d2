// SPDX-License-Identifier: Apache-2.0
// What a task (Backend::Task) has deferred.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"

#include "kernels/operation.h"

namespace precondor {

// Used by the thread that runs the task; by the thread that runs a round while the task waits for it.
struct DeferredTask {
  const Backend* backend = nullptr;  // null: no task has begun
  int depth = 0;                     // tasks within tasks
  std::vector<Operation> operations;
  std::vector<std::pair<float*, int64_t>> freed;  // memory that the operations may still use
  int64_t freed_bytes = 0;
  std::vector<const Operation*> open;  // during a round: the operations that have not run yet, in their order
  absl::Status status;                 // of the last operation, which the task waits for
  bool in_batch = false;
  absl::Status batch_status;  // the first error of what the batch has asked for
};

}  // namespace precondor
