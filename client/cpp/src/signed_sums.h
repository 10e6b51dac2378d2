// SPDX-License-Identifier: Apache-2.0
// Signed sums of rows, from which means and sketches are computed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// out_j = scale * sum_i s_ij x_i. s_ij is -1 if bit j of signs[i] is set, else +1. Empty `signs`: all are +1.
// Shapes:   rows x [n, d]; signs n or none; out [q, d], q <= 32.
// Rounding: f32 over 64 rows, from the first to the last, then added in f64; bitwise equal on all processors.
// Threads:  any.
// `way`: an implementation, below SignedSumsWays(); for tests.
void SignedSums(ConstMatrixView rows, absl::Span<const uint32_t> signs, double scale, MatrixView out, size_t way = 0);

// Number of implementations that this processor can run; 0 is the fastest.
size_t SignedSumsWays();

}  // namespace precondor
