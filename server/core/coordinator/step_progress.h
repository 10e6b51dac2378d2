// SPDX-License-Identifier: Apache-2.0
// The steps that all ranks of a session have reported, and their losses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "server/core/api/coordinator_types.h"

namespace precondor {

// Averages each step's loss over the ranks that have reported it. Keeps the reports of the last `max_steps` steps
// reported, or of fewer if they are more than `most_reports_`. Not
// thread-safe.
class LossTable {
 public:
  struct StepLoss {
    uint64_t step = 0;
    double loss = 0;           // mean over the ranks with a finite loss, weighted by samples; NaN if there are none
    int64_t finite = 0;        // number of these ranks
    uint64_t samples = 0;      // sum of their samples
    double learning_rate = 0;  // greatest reported value; 0: none
  };

  LossTable(int64_t world_size, size_t max_steps) : world_size_(world_size), max_steps_(max_steps) {}

  // Adds a report. Returns the step's loss when the last rank has reported it, once for each step. Returns nullopt
  // before that, for a repetition, and for steps that are no longer kept. Sums in rank order, so the result does not
  // depend on the order of arrival. If there are too many steps, drops the oldest, finished or not.
  std::optional<StepLoss> Add(uint32_t rank, uint64_t step, double loss, uint64_t samples, bool finite,
                              double learning_rate);

  // Forgets all steps. Called in a new epoch, because the job may go back.
  void Clear();

 private:
  struct Report {
    uint32_t rank = 0;
    bool finite = false;
    double loss = 0;
    uint64_t samples = 0;
    double learning_rate = 0;
  };
  struct Step {
    std::vector<Report> reports;  // in the order of arrival; empty once the step is finished
    std::vector<bool> in;         // by rank: whether its report has arrived
    bool finished = false;
  };
  static StepLoss Average(uint64_t step, Step& entry);

  const int64_t world_size_;
  const size_t max_steps_;
  // Most reports of unfinished steps. A call of each rank may bring 64: they are kept up to 8 MiB, and in any case four
  // steps of all ranks.
  const int64_t most_reports_ =
      std::max({int64_t{8192}, 4 * world_size_, std::min(64 * world_size_, int64_t{1} << 18)});
  std::map<uint64_t, Step> steps_;
  int64_t kept_reports_ = 0;  // of unfinished steps
  uint64_t kept_from_ = 0;    // steps below this one are no longer kept
};

struct FinishedStep {
  LossTable::StepLoss loss;
  double seconds = 0;  // time since the preceding step finished; 0: not known
};

// Not thread-safe.
class StepProgress {
 public:
  // `begun`: see the function of this name.
  StepProgress(int64_t world_size, uint64_t lease_steps, bool begun);

  // Adds a member's report. Returns the step if this report completed it. `now` is when its step ended.
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
