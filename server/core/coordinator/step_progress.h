// SPDX-License-Identifier: Apache-2.0
// Which steps all ranks of a session have reported, and with which losses.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/time/time.h"

#include "server/core/coordinator/coordinator_types.h"
#include "server/core/coordinator/loss_table.h"

namespace precondor {

struct FinishedStep {
  LossTable::StepLoss loss;
  double seconds = 0;  // since the step before it finished; 0: not known
};

// Not thread-safe.
class StepProgress {
 public:
  // `open_from`: the lowest step that not all have reported yet.
  StepProgress(int64_t world_size, uint64_t lease_steps, uint64_t open_from);

  // Takes in the report of a member. Returns the step when this report completed it. `now` is monotonic.
  std::optional<FinishedStep> Report(const StepReport& report, absl::Time now);
  // A new epoch: reports of earlier ones count no more.
  void BeginEpoch();
  // The job goes back to this step.
  void GoBackTo(uint64_t step) { open_from_ = step; }

  // The greatest step that all have reported in this epoch.
  uint64_t last_step() const { return last_step_; }
  // What shards say of themselves, by address: the greatest step that each has begun. For people.
  void NoteShard(const std::string& address, uint64_t last_step) { shard_steps_[address] = last_step; }
  const std::map<std::string, uint64_t>& shard_steps() const { return shard_steps_; }
  // The loss of the last step that had a finite one.
  double last_loss() const { return last_loss_; }
  // The lowest step that not all have reported.
  uint64_t open_from() const { return open_from_; }
  // All ranks have come so far beyond the step that a shard which has not seen it never will.
  bool HasPassed(uint64_t step) const;

 private:
  const uint64_t lease_steps_;
  LossTable losses_;
  uint64_t last_step_ = 0;
  std::map<std::string, uint64_t> shard_steps_;
  uint64_t open_from_;
  double last_loss_ = 0;
  absl::Time last_finished_ = absl::InfinitePast();
};

}  // namespace precondor
