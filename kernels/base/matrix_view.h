// SPDX-License-Identifier: Apache-2.0
// Row-major 2-d views of floats that another object owns. Views are cheap to copy and free nothing. The owner knows
// whether the memory belongs to the host or to a backend's device: pass a view that a Backend made only to that
// Backend's operations, and never dereference it elsewhere. All functions are constexpr so that device code can call
// them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace precondor {

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

}  // namespace precondor
