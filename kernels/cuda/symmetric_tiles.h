// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices in 64 x 64 tiles of one triangle (kernels/base/symmetric_tiles.h) on a CUDA device: any number of
// matrices, of any sizes and storages, in one launch.
//
// A block takes a tile: it reads it once, adds the terms, writes it back where it changed, and computes from registers
// what the tile gives to y twice, as itself and as its mirror image. These parts go to `partials` and are added in a
// fixed order by a second launch, so that every run gives the same bits.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"
#include "kernels/base/symmetric_tiles.h"

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
  float* partials = nullptr;        // PartialElements(n, k)
  int64_t first = 0;                // tiles of all jobs before this one

  constexpr bool updates() const { return scale != 1.0f || shift != 0.0 || rows.rows > 0; }
};

constexpr int64_t TileCount(int64_t n) { return TileRows(n) * (TileRows(n) + 1) / 2; }
constexpr int64_t PartialElements(int64_t n, int64_t vectors) { return TileCount(n) * vectors * 2 * kTileSide; }

// The two launches. `jobs` [count] in device memory, with `tiles` tiles in all and at most `segments` tile rows times
// vectors each.
cudaError_t SymmetricUpdateMultiply(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t tiles);
cudaError_t SymmetricSumPartials(cudaStream_t stream, const SymmetricJob* jobs, int count, int64_t segments);
// x [n, n] = what m would become, which stays; both triangles.
struct ExpandJob {
  SymmetricJob m;  // but for its v, y and partials
  void* x = nullptr;
  int64_t stride = 0;
  bool in_bf16 = false;  // what x is made of; otherwise f32
  int64_t first = 0;     // tiles of all jobs before this one
};
// `job` is in host memory; `jobs` [count], of `tiles` tiles in all, in device memory.
cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob& job);
cudaError_t SymmetricExpand(cudaStream_t stream, const ExpandJob* jobs, int count, int64_t tiles);
// m = x, lower triangle read.
cudaError_t SymmetricCompress(cudaStream_t stream, ConstMatrixView x, void* tiles, SymmetricStorage storage);

}  // namespace precondor::cuda
