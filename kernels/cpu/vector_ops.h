// SPDX-License-Identifier: Apache-2.0
// Loops over the elements of rows, in the widest vectors of the processor if the build has Highway. Lengths are in
// elements; nothing need be aligned. Sums run in an order that depends on the length and the processor alone.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor::cpu {

// Returns sum_i x_i y_i in f64.
double Dot(const float* x, const float* y, int64_t n);
// Returns sum_i weights_i x_i^2 with weights_i x_i rounded to f32 and the rest in f64.
double WeightedSquare(const float* weights, const float* x, int64_t n);
// y_i = scale x_i. x may be y.
void Scale(float scale, const float* x, int64_t n, float* y);
// y_i = x_i as bf16, rounded to nearest even; a NaN may become any number.
void RoundToBf16(const float* x, int64_t n, uint16_t* y);
// out_i = low_i as bf16 in the lower half, and high_i as bf16 in the upper half, or 0 if `high` is null.
void PairAsBf16(const float* low, const float* high, int64_t n, uint32_t* out);
// out[i] = rows_i . x in f32, in one pass over the rows at memory speed.
void RowProducts(ConstMatrixView rows, const float* x, float* out);

}  // namespace precondor::cpu
