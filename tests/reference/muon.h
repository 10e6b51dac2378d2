// SPDX-License-Identifier: Apache-2.0
// Method muon in f64, one formula after the other in the order of the published code (docs/use/methods/muon.md). Slow
// and plain; shares nothing with the code under test.
#pragma once

#include <cstdint>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

struct MuonOptions {
  double beta = 0.95;
  bool nesterov = true;
  int iterations = 5;
  bool original_scale = false;  // else the one that matches AdamW's root mean square
  double epsilon = 1e-7;
  bool input_factor = false;
  double damping = 0.2, covariance_decay = 0.95;
  int refresh_interval = 10;
};

class Muon {
 public:
  Muon(MuonOptions options, int64_t d_out, int64_t d_in)
      : options_(options), momentum_(d_out, d_in), covariance_(d_in, d_in), inverse_(Identity(d_in)) {}
  // The answer to the next gradient.
  Dense Step(const Dense& gradient);
  // The last answer is the orthogonalized form of this.
  const Dense& direction() const { return direction_; }

 private:
  // Takes a gradient into the factor of later ones.
  void Learn(const Dense& gradient);

  const MuonOptions options_;
  Dense momentum_, direction_;
  Dense covariance_, inverse_;  // A, and (A / a + damping I)^-1 for the mean a of its diagonal
  int steps_ = 0;
};

}  // namespace precondor::reference
