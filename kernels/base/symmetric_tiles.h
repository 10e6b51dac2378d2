// SPDX-License-Identifier: Apache-2.0
// How a symmetric n x n matrix lies in memory: the 64 x 64 tiles of its lower triangle, one after another.
//   Tile (I, J), J <= I, holds elements (64 I + i, 64 J + j) at i * 64 + j. Tile row after tile row, J ascending. Tiles
//   on the diagonal hold both their triangles. The last tile row has n - 64 I rows; what its diagonal tile holds beyond
//   column n is zero. About half of what a full matrix takes, read as one stream.
#pragma once

#include <cstdint>

namespace precondor {

// f16 takes half the memory at a relative error of 2^-11 an element; |elements| stay below 65504.
enum class SymmetricStorage : uint8_t { kF32, kF16 };

constexpr int64_t kTileSide = 64;

constexpr int64_t TileRows(int64_t n) { return (n + kTileSide - 1) / kTileSide; }
// Not std::min, which takes references: device code has no address for the constant.
constexpr int64_t TileHeight(int64_t n, int64_t tile_row) {
  const int64_t left = n - kTileSide * tile_row;
  return left < kTileSide ? left : kTileSide;
}
// Elements that lie before tile (I, J).
constexpr int64_t TileOffset(int64_t n, int64_t tile_row, int64_t tile_column) {
  return (tile_row * (tile_row + 1) / 2 * kTileSide + tile_column * TileHeight(n, tile_row)) * kTileSide;
}
constexpr int64_t TileElements(int64_t n) { return n == 0 ? 0 : TileOffset(n, TileRows(n) - 1, TileRows(n)); }
constexpr int64_t TileBytes(int64_t n, SymmetricStorage storage) {
  return TileElements(n) * (storage == SymmetricStorage::kF32 ? 4 : 2);
}

}  // namespace precondor
