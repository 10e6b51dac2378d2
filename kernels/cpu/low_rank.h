// SPDX-License-Identifier: Apache-2.0
// Backend::LowRankPrecondition on the CPU: the length of the answer is known before the product that makes it, so that
// no pass over it is left but that product's own.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/backend.h"

namespace precondor::cpu {

// Elements of scratch for d [m, n] and sides of p and q vectors.
int64_t LowRankScratch(int64_t m, int64_t n, int64_t p, int64_t q);

// Arguments as Backend has checked them, sides without vectors with empty matrices of the right shape. `rule` may be
// null: u = J_out d J_in then. `scratch` has LowRankScratch elements, whatever is in them.
absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                 const LengthRule* rule, float* scratch, MatrixView u);

}  // namespace precondor::cpu
