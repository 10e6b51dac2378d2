// SPDX-License-Identifier: Apache-2.0
// The low-rank form of an inverse factor, as Backend's operations take it.
#pragma once

#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// One side's inverse factor J = c (I - P' S P) with P [n, d] (vectors as rows) and S [n, n] symmetric. n == 0 means
// that J is c I.
struct LowRankInverse {
  double c = 1.0;
  ConstMatrixView vectors;           // P
  ConstMatrixView core;              // S
  absl::Span<const double> roots{};  // s, where S = s (I + s P P' s)^-1 s for a diagonal s >= 0; empty otherwise
};

}  // namespace precondor
