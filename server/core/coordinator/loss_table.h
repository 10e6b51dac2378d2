// SPDX-License-Identifier: Apache-2.0
// Averages each step's loss over the ranks that have reported it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace precondor {

// Keeps the reports of the last `max_steps` steps reported, or of fewer if they are more than `most_reports_`. Not
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
  // Most bytes of unfinished steps: 256 KiB, or four steps of all ranks, which wait for each other.
  const int64_t most_reports_ = std::max<int64_t>(8192, 4 * world_size_);
  std::map<uint64_t, Step> steps_;
  int64_t kept_reports_ = 0;  // of unfinished steps
  uint64_t kept_from_ = 0;    // steps below this one are no longer kept
};

}  // namespace precondor
