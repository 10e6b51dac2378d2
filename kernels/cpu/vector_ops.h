// SPDX-License-Identifier: Apache-2.0
// Loops over the elements of rows, in the widest vectors of the processor. Lengths are in elements; nothing need be
// aligned. Sums run in an order that depends on the length and the processor alone.
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
// out[i] = rows_i . x in f32, in one pass over the rows at memory speed.
void RowProducts(ConstMatrixView rows, const float* x, float* out);

}  // namespace precondor::cpu
