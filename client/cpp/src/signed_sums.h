// SPDX-License-Identifier: Apache-2.0
// The sums of rows that means and sketches are made of, several at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// out_j = scale * sum_i s_ij x_i. Bit j of signs[i] set makes s_ij -1; `signs` empty: all are +1.
// Shapes:   rows x [n, d]; signs n or none; out [q, d], q <= 32.
// Rounding: f32 over 64 rows, from the first to the last, then folded into f64; the same bits on all processors.
// Threads:  any.
// `way`: of SignedSumsWays(), for tests.
void SignedSums(ConstMatrixView rows, absl::Span<const uint32_t> signs, double scale, MatrixView out, size_t way = 0);

// How many ways this processor has to make them; 0 is the fastest.
size_t SignedSumsWays();

}  // namespace precondor
