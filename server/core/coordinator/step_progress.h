// SPDX-License-Identifier: Apache-2.0
// The steps that all ranks of a session have reported, and their losses.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/time/time.h"

#include "server/core/api/coordinator_types.h"
#include "server/core/coordinator/loss_table.h"

namespace precondor {

struct FinishedStep {
  LossTable::StepLoss loss;
  double seconds = 0;  // time since the preceding step finished; 0: not known
};

// Not thread-safe.
class StepProgress {
 public:
  // `begun`: see the function of this name.
  StepProgress(int64_t world_size, uint64_t lease_steps, bool begun);

  // Adds a member's report. Returns the step if this report completed it. `now` is monotonic.
  std::optional<FinishedStep> Report(const StepReport& report, absl::Time now);
  // Begins a new epoch: reports of earlier epochs no longer count.
  void BeginEpoch();

  // Returns whether a rank has reported a step, in any epoch, or may have before the coordinator was restarted.
  bool begun() const { return begun_; }
  // Returns the greatest step that all ranks have reported in this epoch, or 0.
  uint64_t last_step() const { return last_step_; }
  // Notes the greatest step that a shard has begun, by its address. For people.
  void NoteShard(const std::string& address, uint64_t last_step) { shard_steps_[address] = last_step; }
  const std::map<std::string, uint64_t>& shard_steps() const { return shard_steps_; }
  // Returns the loss of the last finished step that had a finite one.
  double last_loss() const { return last_loss_; }
  // Returns whether all ranks have reported a step at least a lease beyond `step`. A shard without the step never gets
  // it then.
  bool HasPassed(uint64_t step) const;

 private:
  const uint64_t lease_steps_;
  LossTable losses_;
  uint64_t last_step_ = 0;
  std::map<std::string, uint64_t> shard_steps_;
  bool begun_;
  double last_loss_ = 0;
  absl::Time last_finished_ = absl::InfinitePast();
};

}  // namespace precondor
