// SPDX-License-Identifier: Apache-2.0
// Scratch memory that backends allocate for decompositions in f64, operands not included; for admission.
#pragma once

#include <cstdint>

namespace precondor {

// Upper bounds in bytes for n rows: copies in f64 and LAPACK's work space (1 + 6 n + 2 n^2 numbers for eigenvectors),
// each rounded up by at most an eighth.
constexpr int64_t SymmetricEigenScratchBytes(int64_t n) { return 27 * n * n + 86 * n + 64; }
// A device uses two matrices in f64 for up to kMostRowsOfSpdInverse rows (kernels/cuda/spd_inverses.h), and one for
// more.
constexpr int64_t SpdInverseScratchBytes(int64_t n) { return (n <= 256 ? 16 : 9) * n * n + 256; }

}  // namespace precondor
