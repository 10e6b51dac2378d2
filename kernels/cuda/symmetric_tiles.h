// SPDX-License-Identifier: Apache-2.0
// Operations on symmetric matrices in 64 x 64 tiles of one triangle (kernels/base/matrix_view.h) on a CUDA device.
// One launch handles any number of matrices, of any sizes and storages.
//
// A block handles a tile. It reads the tile once, adds the terms, and writes the tile back if it changed. From
// registers it computes the tile's two contributions to y, as itself and as its mirror image. They go to `partials`,
// and a second launch adds them in a fixed order, so that every run gives the same bits.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// m = scale m + shift I + sum_i weights[i] rows_i rows_i', then y = v m. Pointers are to device memory.
struct SymmetricJob {
  void* tiles = nullptr;
  int64_t n = 0;
  SymmetricStorage storage = SymmetricStorage::kF32;
  float scale = 1.0f;
  double shift = 0.0;
  const double* weights = nullptr;  // [rows.rows]
  ConstMatrixView rows;             // [p, n]
  ConstMatrixView v;                // [k, n]
  MatrixView y;                     // [k, n]
  float* partials = nullptr;        // [PartialElements(n, k)]
  int64_t first = 0;                // tiles of all jobs before this one

  constexpr bool updates() const { return scale != 1.0f || shift != 0.0 || rows.rows > 0; }
};

constexpr int64_t TileCount(int64_t n) { return TileRows(n) * (TileRows(n) + 1) / 2; }
constexpr int64_t PartialElements(int64_t n, int64_t vectors) { return TileCount(n) * vectors * 2 * kTileSide; }

// The two launches, for `jobs` [count] in device memory. `tiles` is the total number of tiles, and `segments` the
// greatest number of tile rows times vectors of a job.
cudaError_t SymmetricUpdateMultiply(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t tiles);
cudaError_t SymmetricSumPartials(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t segments);
// Computes x [n, n], both triangles, as the value that the update of m would give; m does not change.
struct ExpandJob {
  SymmetricJob m;  // without v, y and partials
  void* x = nullptr;
  int64_t stride = 0;
  bool in_bf16 = false;  // elements of x are bf16; otherwise f32
  int64_t first = 0;     // tiles of all jobs before this one
};
// Run one job, in host memory, or `count` jobs in device memory, of `tiles` tiles in all.
cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob& job);
cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob* jobs, int count, int64_t tiles);

}  // namespace precondor::cuda
