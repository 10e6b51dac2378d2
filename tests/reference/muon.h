// SPDX-License-Identifier: Apache-2.0
// Method muon in f64, one formula after the other in the order of the published code (docs/use/methods/muon.md). Slow
// and plain; shares nothing with the code under test.
#pragma once

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

struct MuonOptions {
  double beta = 0.95;
  bool nesterov = true;
  int iterations = 5;
  bool original_scale = false;  // else the one that matches AdamW's root mean square
  double epsilon = 1e-7;
};

class Muon {
 public:
  Muon(MuonOptions options, int64_t d_out, int64_t d_in) : options_(options), momentum_(d_out, d_in) {}
  // The answer to the next gradient.
  Dense Step(const Dense& gradient);
  // The last answer is the orthogonalized form of this.
  const Dense& direction() const { return direction_; }

 private:
  const MuonOptions options_;
  Dense momentum_, direction_;
};

}  // namespace precondor::reference
