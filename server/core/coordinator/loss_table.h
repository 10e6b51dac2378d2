// SPDX-License-Identifier: Apache-2.0
// The loss of each step, averaged over the ranks that reported it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace precondor {

// One slot a rank and step, of the last `max_steps` steps reported. Not thread-safe.
class LossTable {
 public:
  struct StepLoss {
    uint64_t step = 0;
    double loss = 0;           // sample-weighted over the ranks whose loss was finite; NaN when none was
    int64_t finite = 0;        // those ranks
    uint64_t samples = 0;      // and their samples
    double learning_rate = 0;  // the greatest that was reported; 0: none was
  };

  LossTable(int64_t world_size, size_t max_steps) : world_size_(world_size), max_steps_(max_steps) {}

  // Takes a report in. The step's loss once every rank has reported it, exactly once; nullopt before, for a
  // repetition and for steps too old to be kept. Summed in rank order: the same in any order of arrival. When there are
  // too many steps the oldest goes, finished or not.
  std::optional<StepLoss> Add(uint32_t rank, uint64_t step, double loss, uint64_t samples, bool finite,
                              double learning_rate);

  // A new epoch: steps may go back.
  void Clear();

 private:
  struct Report {
    bool in = false;
    bool finite = false;
    double loss = 0;
    uint64_t samples = 0;
    double learning_rate = 0;
  };
  struct Step {
    std::vector<Report> reports;  // empty once finished
    int64_t arrived = 0;
  };
  static StepLoss Average(uint64_t step, const Step& entry);

  const int64_t world_size_;
  const size_t max_steps_;
  std::map<uint64_t, Step> steps_;
  uint64_t kept_from_ = 0;  // steps below it are too old
};

}  // namespace precondor
