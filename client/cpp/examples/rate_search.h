// SPDX-License-Identifier: Apache-2.0
// Chooses learning rates, for every method by the same rule, in this process.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "client/cpp/examples/digits_data.h"
#include "client/cpp/examples/job.h"
#include "client/cpp/examples/task.h"

namespace precondor::digits {

// Trains `run` in this process with the method called directly: the trajectory that the service gives, but for
// rounding.
absl::StatusOr<RunResult> TrainInProcess(const Run& run, const DigitsData& data);

// What a task is judged by, at one point of a curve.
double CriterionLoss(const Task& task, const CurvePoint& point);

// Of an odd or even number of values; infinities and NaN count as worst. Needs at least one.
double Median(std::vector<double> values);

struct RateSearch {
  std::vector<double> grid;     // ascending, each twice the one before
  std::vector<uint64_t> seeds;  // the median over them decides
  int threads = 1;
};

struct RateChoice {
  double learning_rate = 0;
  std::vector<double> tried;   // ascending
  std::vector<double> losses;  // the median held-out loss at the end of training, as `tried`
};

// At most this many doublings beyond an end of the grid.
inline constexpr int kMaxGridExtensions = 4;

// One choice for each of `runs`, whose seed and learning_rate are ignored: the rate with the smallest median final
// loss. While the best is an end of what was tried, the next power of two beyond is tried too, for every method alike.
// `progress` gets (done, planned so far), from any thread but never from two at once.
absl::StatusOr<std::vector<RateChoice>> ChooseRates(const std::vector<Run>& runs, const RateSearch& search,
                                                    const DigitsData& data,
                                                    const std::function<void(int64_t, int64_t)>& progress);

// Calls work(i) for i in 0 ... count - 1 on `threads` threads; the failure with the lowest i, if any.
absl::Status ParallelFor(int64_t count, int threads, const std::function<absl::Status(int64_t)>& work);

}  // namespace precondor::digits
