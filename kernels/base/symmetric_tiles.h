// SPDX-License-Identifier: Apache-2.0
// Memory layout of a symmetric n x n matrix: the 64 x 64 tiles of its lower triangle, one after another.
//   Tile (I, J), J <= I, holds elements (64 I + i, 64 J + j) at i * 64 + j. Tiles are ordered by row, then by column.
//   Tiles on the diagonal hold both of their triangles. The last tile row has n - 64 I rows; its diagonal tile is zero
//   beyond column n. The layout takes about half the memory of a full matrix and is read as one stream.
#pragma once

#include <cstdint>

namespace precondor {

// f16 takes half the memory, with a relative error of 2^-11 per element. |elements| must stay below 65504.
enum class SymmetricStorage : uint8_t { kF32, kF16 };

constexpr int64_t kTileSide = 64;

constexpr int64_t TileRows(int64_t n) { return (n + kTileSide - 1) / kTileSide; }
// Does not use std::min, which takes references: device code has no address for the constant.
constexpr int64_t TileHeight(int64_t n, int64_t tile_row) {
  const int64_t left = n - kTileSide * tile_row;
  return left < kTileSide ? left : kTileSide;
}
// Number of elements before tile (I, J).
constexpr int64_t TileOffset(int64_t n, int64_t tile_row, int64_t tile_column) {
  return (tile_row * (tile_row + 1) / 2 * kTileSide + tile_column * TileHeight(n, tile_row)) * kTileSide;
}
constexpr int64_t TileElements(int64_t n) { return n == 0 ? 0 : TileOffset(n, TileRows(n) - 1, TileRows(n)); }
constexpr int64_t TileBytes(int64_t n, SymmetricStorage storage) {
  return TileElements(n) * (storage == SymmetricStorage::kF32 ? 4 : 2);
}

}  // namespace precondor
