// SPDX-License-Identifier: Apache-2.0
// How matrices lie in memory: row-major, or, if they are symmetric, in tiles. All functions are constexpr so that
// device code can call them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace precondor {

// A row-major 2-d view of floats that another object owns. Views are cheap to copy and free nothing. The owner knows
// whether the memory belongs to the host or to a backend's device: pass a view that a Backend made only to that
// Backend's operations, and never dereference it elsewhere.
template <typename T>
struct BasicMatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from the start of a row to the start of the next, >= cols

  constexpr BasicMatrixView() = default;
  constexpr BasicMatrixView(T* data, int64_t rows, int64_t cols) : BasicMatrixView(data, rows, cols, cols) {}
  constexpr BasicMatrixView(T* data, int64_t rows, int64_t cols, int64_t stride)
      : data(data), rows(rows), cols(cols), stride(stride) {}
  // A mutable view is also a constant one, like T* and const T*: NOLINTBEGIN(google-explicit-constructor)
  template <typename U>
  requires(!std::is_same_v<U, T> &&
           std::is_convertible_v<U*, T*>) constexpr BasicMatrixView(const BasicMatrixView<U>& other)
      : data(other.data), rows(other.rows), cols(other.cols), stride(other.stride) {}
  // NOLINTEND(google-explicit-constructor)
  constexpr int64_t size() const { return rows * cols; }
  constexpr bool contiguous() const { return stride == cols || rows <= 1; }
  constexpr T* row(int64_t i) const { return data + i * stride; }
  constexpr T& at(int64_t i, int64_t j) const { return data[i * stride + j]; }
  // Returns rows [begin, begin + count).
  constexpr BasicMatrixView RowRange(int64_t begin, int64_t count) const {
    return BasicMatrixView(data + begin * stride, count, cols, stride);
  }
  // Returns the top-left [r, c] corner.
  constexpr BasicMatrixView Corner(int64_t r, int64_t c) const { return BasicMatrixView(data, r, c, stride); }
};

using MatrixView = BasicMatrixView<float>;
using ConstMatrixView = BasicMatrixView<const float>;

// Memory layout of a symmetric n x n matrix: the 64 x 64 tiles of its lower triangle, one after another.
//   Tile (I, J), J <= I, holds elements (64 I + i, 64 J + j) at i * 64 + j. Tiles are ordered by row, then by column.
//   Tiles on the diagonal hold both of their triangles. The last tile row has n - 64 I rows; its diagonal tile is zero
//   beyond column n. The layout takes about half the memory of a full matrix and is read as one stream.
//
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
