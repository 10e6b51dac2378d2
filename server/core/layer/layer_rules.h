// SPDX-License-Identifier: Apache-2.0
// The constants of one layer of a session that the layer's state machine needs.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/base/session_spec.h"
#include "server/core/layer/contributions.h"

namespace precondor {

// A value type. `spec` must outlive it.
struct LayerRules {
  const SessionSpec* spec = nullptr;
  uint32_t layer = 0;
  bool needs_statistics = true;  // Method::needs_statistics
  uint64_t window_steps = 2;     // see ShardOptions

  Contributions statistics_contributors() const;
  Contributions gradient_contributors() const;
  bool SendsGradient(uint32_t rank) const;
  // Returns true if one rank sends the gradients and gets the answers.
  bool one_answer() const;
  // Returns true if workers hold the factors too (REPLAY, PULL_FACTORS). A pull then takes the gradient's place.
  bool workers_precondition() const { return WorkersPrecondition(*spec); }
  // Returns true if some steps have no gradient, so that the next step with one can be any number of steps ahead.
  bool has_gaps() const;
  bool ExpectsStatistics(uint64_t step, Mode mode) const;
  // Returns ABORTED (STALE_STEP), for requests that wait for the answer to a step that has been retired.
  absl::Status Retired() const;
};

}  // namespace precondor
