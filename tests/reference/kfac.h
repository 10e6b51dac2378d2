// SPDX-License-Identifier: Apache-2.0
// Method kfac in f64, every factor dense and every inverse solved for (docs/use/methods/kfac.md).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "tests/reference/mkor.h"
#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

struct KfacOptions {
  bool inverse = false;  // (G + damping I)^-1 D (A + damping I)^-1 instead of the joint damping of the eigen form
  bool prediv = false;
  bool pi_split = false;
  double row_scale = 1.0;
  int64_t accumulation_steps = 1;
  uint64_t refresh_lag = 0;
  // Functions of the number of updates before.
  std::function<double(uint64_t)> damping = [](uint64_t) { return 0.001; };
  std::function<double(uint64_t)> factor_decay = [](uint64_t) { return 0.95; };
  std::function<uint64_t(uint64_t)> factor_update_steps = [](uint64_t) { return 1; };
  std::function<uint64_t(uint64_t)> inv_update_steps = [](uint64_t) { return 1; };
};

// (1/k) sum v v'.
Dense SecondMoment(const Vectors& vectors);
// The lower triangle, row after row.
Vector PackedLower(const Dense& a);

// One layer, decomposing at the updates t with t % inv_update_steps(t) == 0. What the first decomposition gives is used
// at once, what another gives refresh_lag updates later; until then no further one begins. U comes without any scaling;
// before the first decomposition it is D.
class Kfac {
 public:
  Kfac(const KfacOptions& options, int64_t d_out, int64_t d_in);
  // Second moments of one step.
  void Update(const Dense& a, const Dense& g);
  // d and the result row-major [d_out, d_in]. The eigen form is solved as the linear system
  // (G (x) A + damping I) u = d that it stands for: O((d_out d_in)^3).
  Vector Precondition(const Vector& d) const;
  const Dense& a() const { return a_; }
  const Dense& g() const { return g_; }

 private:
  struct Decomposed {
    Dense a, g;
    double damping = 0;
    double pi = 1;
    uint64_t at = 0;
  };

  const KfacOptions options_;
  const int64_t d_out_, d_in_;
  uint64_t updates_ = 0;
  int64_t accumulated_ = 0;
  double decay_ = 0;
  Dense a_, g_;
  bool waiting_ = false, ready_ = false;
  Decomposed decomposed_;
  std::optional<Decomposed> next_decomposed_;
};

}  // namespace precondor::reference
