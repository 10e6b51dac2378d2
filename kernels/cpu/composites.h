// SPDX-License-Identifier: Apache-2.0
// Composite operations of Backend that the CPU has implementations of. Precondition: Backend has checked the arguments.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "kernels/backend.h"

namespace precondor::cpu {

// Returns the elements of scratch for d [m, n] and sides of p and q vectors.
int64_t LowRankScratch(int64_t m, int64_t n, int64_t p, int64_t q);

// Computes u = J_out d J_in, times the rule's factor unless `rule` is null. It computes the norm of the answer before
// the product that makes the answer, so that it needs no other pass over the answer. Sides without vectors have empty
// matrices of the right shape. `scratch` has LowRankScratch elements of any contents.
absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                 const LengthRule* rule, float* scratch, MatrixView u);

// Run operations on symmetric matrices, with the kernels of symmetric_tiles.h. The backend provides scratch.
absl::Status Run(Backend& backend, const operation::SymmetricUpdateMultiply& update);
absl::Status Run(Backend& backend, const operation::SymmetricExpand& expand);

}  // namespace precondor::cpu
