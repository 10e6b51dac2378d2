// SPDX-License-Identifier: Apache-2.0
// Rows as tests/bench/rows.py takes them, and what benchmarks of factors check answers with.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace precondor {

// Repeated measurements of one figure. `low` and `high` are the quartiles, so that half of them lie between.
struct Summary {
  double median = 0;
  double low = 0, high = 0;
  int count = 0;
};
// Precondition: there is at least one value.
Summary Summarize(std::vector<double> values);
// Each value times `factor`, or `amount` divided by each value.
Summary Scaled(const Summary& summary, double factor);
Summary RateOf(double amount, const Summary& seconds);

struct BenchRow {
  std::string name;
  double value = 0;
  std::string unit;
  double limit = 0;      // 0: none; the ratio is limit / value
  double target = 0;     // 0: none; for the ratio, or for the value where there is no limit
  bool at_most = false;  // what the target is for may not exceed it; otherwise it has to reach it
  Summary spread = {};   // of `value`, in its unit; a count of 0: measured once
};

// {"name": ..., "value": ..., "unit": ..., "limit": ..., "ratio": ..., "target": ..., "pass": ..., "spread": ...} in
// one line, without a newline.
std::string RowJson(const BenchRow& row);

// Aborts where the file cannot be written.
void WriteRows(const std::vector<BenchRow>& rows, const std::string& path);

// A program that measures: writes `measure`'s rows to the file of --json=FILE; --short shows only that all of it runs
// and is right. `take` is asked about each other argument; false: there is none such. The program's exit code.
int BenchMain(int argc, char** argv, const std::function<std::vector<BenchRow>(bool is_short)>& measure,
              const std::function<bool(absl::string_view argument)>& take = nullptr);

// Processor time of the calling thread.
double ThreadSeconds();
// That of `work`.
double Timed(const std::function<void()>& work);
// By the clock.
double ClockSeconds(const std::function<void()>& work);

double Median(std::vector<double> values);

// seconds[i][turn] that measured[i] gives, all of them in turns; a first turn warms up and is left out.
std::vector<std::vector<double>> TakeTurns(const std::vector<std::function<double()>>& measured, int turns);

// The median over turns of above[turn] / below[turn].
double MedianRatio(const std::vector<double>& above, const std::vector<double>& below);

std::vector<float> Gaussian(int64_t count, uint64_t seed);

// (L / (1 - gamma^t) + damping tr(L / (1 - gamma^t)) / d I) x in doubles, for L the decayed average of v v' over t
// steps of one vector each, vectors[t - 1] the last: what EXACT_DAMPED inverts (docs/use/methods/mkor.md).
std::vector<double> DampedTimes(const std::vector<std::vector<float>>& vectors, double gamma, double damping,
                                const std::vector<double>& x);

// BLEND in doubles from its definition (docs/use/methods/mkor.md), one vector a step, J as its terms, so that d may be
// large.
class BlendRecursion {
 public:
  BlendRecursion(double gamma, double damping) : gamma_(gamma), damping_(damping) {}
  void Update(const std::vector<float>& vector);
  std::vector<double> Times(const std::vector<double>& v) const;

 private:
  struct Term {
    double weight = 0;
    std::vector<double> vector;
  };
  const double gamma_, damping_;
  double mass_ = 0, mean_square_ = 0, identity_ = 1;
  std::vector<Term> terms_;
};

}  // namespace precondor
