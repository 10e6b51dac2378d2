// SPDX-License-Identifier: Apache-2.0
// What the backends take from their memory for decompositions in f64, beside the operands: for admission.
#pragma once

#include <cstdint>

namespace precondor {

// Upper bounds in bytes for n rows: copies in f64 and LAPACK's work space (1 + 6 n + 2 n^2 numbers for eigenvectors),
// each rounded up by an eighth at most.
constexpr int64_t SymmetricEigenScratchBytes(int64_t n) { return 27 * n * n + 86 * n + 64; }
// Of up to kMostRowsOfSpdInverse (kernels/cuda/spd_inverses.h) a device takes two matrices in f64, else one.
constexpr int64_t SpdInverseScratchBytes(int64_t n) { return (n <= 256 ? 16 : 9) * n * n + 256; }

}  // namespace precondor
