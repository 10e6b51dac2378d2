// SPDX-License-Identifier: Apache-2.0
// Kernels for symmetric matrices in tiles (kernels/base/matrix_view.h) in host memory: written once, compiled for
// each instruction set that the compiler supports, and selected at the first call. Sums run in an order that depends on
// the instruction set alone.
//
// All pointers are aligned to 64 bytes; vectors are padded with zeros to PaddedLength(n). Thread-safe on distinct
// outputs.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor::tiles {

constexpr int64_t PaddedLength(int64_t n) { return TileRows(n) * kTileSide; }

// A symmetric matrix in tiles.
struct Tiles {
  void* data;  // f32 or f16
  int64_t n;
  SymmetricStorage storage;
};

// The sum of left_i right_i', with left_i = right_i or left_i = -right_i. Both sides are panels: element 64 J + j of
// vector i is at (J count + i) * 64 + j, so that the elements that one tile needs are contiguous.
struct Terms {
  const float* left = nullptr;
  const float* right = nullptr;
  int64_t count = 0;
};

// m = scale m + shift I + terms; then y = m v for `count` vectors, v and y [count, PaddedLength(n)], in one pass over
// m. m is unchanged if scale is 1, shift is 0 and there are no terms. y is the product with m as stored, after any
// rounding to f16. `scratch` has MultiplyScratch(n, count) floats.
void UpdateMultiply(float scale, double shift, const Terms& terms, const Tiles& m, const float* v, int64_t count,
                    float* y, float* scratch);
int64_t MultiplyScratch(int64_t n, int64_t count);

// x = scale m + shift I + terms as a full matrix, in the arithmetic of UpdateMultiply, for the m with these tiles. x
// need not be aligned.
void Expand(float scale, double shift, const Terms& terms, const void* tiles, int64_t n, SymmetricStorage storage,
            MatrixView x);

}  // namespace precondor::tiles
