// SPDX-License-Identifier: Apache-2.0
// Method eva in f64, with the damped Fisher block written out and solved (docs/use/methods/eva.md).
#pragma once

#include <cstdint>

#include "tests/reference/mkor.h"
#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

struct EvaOptions {
  double mu = 0.03;
  double weight = 0.95;
  double row_scale = 1.0;
};

// One layer. U comes without any scaling; before the first Update it is D.
class Eva {
 public:
  Eva(const EvaOptions& options, int64_t d_out, int64_t d_in) : options_(options), d_out_(d_out), d_in_(d_in) {}
  void Update(const Vectors& a, const Vectors& g);
  // The closed form. d and the result row-major [d_out, d_in].
  Vector Precondition(const Vector& d) const;
  // The same as (v v' + mu I)^-1 d with v = g (x) a of d_out d_in elements: the definition, O((d_out d_in)^3).
  Vector Solve(const Vector& d) const;
  const Vector& a() const { return a_; }
  const Vector& g() const { return g_; }

 private:
  const EvaOptions options_;
  const int64_t d_out_, d_in_;
  Vector a_, g_;
};

}  // namespace precondor::reference
