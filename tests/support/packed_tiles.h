// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices in tiles (kernels/base/matrix_view.h), packed on the host.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/dtype.h"
#include "kernels/base/matrix_view.h"

namespace precondor {

// The memory of a matrix in tiles, for symmetric x [n, n], of which the lower triangle is read.
inline std::vector<float> PackedTiles(ConstMatrixView x, SymmetricStorage storage) {
  const int64_t n = x.rows;
  std::vector<float> tiles(TileElements(n), 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n && j / kTileSide <= i / kTileSide; ++j) {
      const int64_t row = i / kTileSide, column = j / kTileSide;
      tiles[TileOffset(n, row, column) + i % kTileSide * kTileSide + j % kTileSide] = j <= i ? x.at(i, j) : x.at(j, i);
    }
  }
  if (storage == SymmetricStorage::kF32) return tiles;
  std::vector<float> halves(tiles.size() / 2);
  EncodeElements(DType::kF16, tiles, 1.0f, halves.data());
  return halves;
}

// m = x for x in the host's memory, of which the lower triangle is read.
inline absl::Status SetTiles(Backend& backend, ConstMatrixView x, SymmetricMatrix& m) {
  const std::vector<float> packed = PackedTiles(x, m.storage());
  return backend.Upload(ConstMatrixView(packed.data(), m.raw().rows, m.raw().cols), m.raw());
}

}  // namespace precondor
