// SPDX-License-Identifier: Apache-2.0
// Loads and stores of device memory in kernels. A thread issues many loads at once, and moves four neighbouring
// elements at a time if they are aligned. Include it in .cu files only.
//
// A pointer that a kernel reads from a table of jobs is generic: the compiler assumes that a store through it may
// change what any other pointer points to, and keeps all later loads behind the store. So a kernel first loads all that
// it needs into registers, and stores afterwards.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Returns p. The compiler may assume that it points to device memory.
template <typename T>
__device__ __forceinline__ T* Global(T* p) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// Number of neighbouring elements that a thread loads or stores at once.
constexpr int kFour = 4;
template <typename T>
struct alignas(kFour * sizeof(T)) Vec4 {
  T at[kFour];
};

// The elements of a block's patch of a matrix that a thread moves: four columns from `column` on, a multiple of 4, in
// each of the rows row, row + step, ...
struct Vec4Position {
  int row, step, column;
};

// A thread's elements: groups of four neighbours (fours) that lie `step` elements apart. The first `end` fours exist,
// and of each the first `columns` elements. by_fours: all fours are aligned, and `columns` is either 4 or more, or not
// positive.
template <typename T>
struct Vec4s {
  T* first;
  int64_t step;
  int end, columns;
  bool by_fours;
};

// Returns whether the fours of a matrix are aligned and each lies wholly inside or outside a patch of `columns`
// columns. A thread moves the same elements in either case, so no sum depends on the result. All threads of a block get
// the same result.
template <typename T>
__device__ __forceinline__ bool MovesByFours(const T* data, int64_t stride, int columns) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride * sizeof(T))) % sizeof(Vec4<T>) == 0 &&
         columns % kFour == 0;
}

// Returns how many of first, first + step, ... are below `limit`.
__device__ __forceinline__ int CountBelow(int limit, int first, int step) { return (limit - first + step - 1) / step; }

// Returns data + offset. The data of a matrix without elements may be null, to which C++ on the host allows no offset
// to be added. On the device a test for null costs registers that some kernels lack, and no kernel reads the address.
template <typename T>
__device__ __forceinline__ T* At(T* data, int64_t offset) {
#ifdef __CUDA_ARCH__
  return data + offset;
#else
  return data == nullptr ? data : data + offset;
#endif
}

// Returns the elements, at place `at`, of the patch of at most kRows x kColumns at (row, column) of x.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ Vec4s<T> Vec4sOf(const BasicMatrixView<T>& x, int64_t row, int64_t column, Vec4Position at) {
  const int64_t rows_left = x.rows - row, columns_left = x.cols - column;
  const int rows = static_cast<int>(rows_left < kRows ? rows_left : kRows);
  const int columns = static_cast<int>(columns_left < kColumns ? columns_left : kColumns);
  return {At(x.data, (row + at.row) * x.stride + column + at.column), at.step * x.stride,
          CountBelow(rows, at.row, at.step), columns - at.column, MovesByFours(x.data, x.stride, columns)};
}

// Loads the fours; elements that do not exist become zero. Issues all loads before it waits for the first.
template <int kCount, typename T>
__device__ __forceinline__ void LoadVec4s(const Vec4s<const T>& from, Vec4<T> (&fours)[kCount]) {
  const T* const first = Global(from.first);
  if (from.by_fours) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fours[i] = Vec4<T>{};
      if (i < from.end && from.columns > 0) fours[i] = *reinterpret_cast<const Vec4<T>*>(first + i * from.step);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) {
      fours[i].at[c] = T{};
      if (i < from.end && c < from.columns) fours[i].at[c] = first[i * from.step + c];
    }
  }
}

// Loads kCount fours of a row of `size` elements, `step` elements apart from `first` on; elements beyond the row become
// zero. `aligned`: the fours of every row are aligned. first % step is the thread's offset in a run of `step` elements.
template <int kCount, typename T>
__device__ __forceinline__ void LoadFoursOfRow(const T* row, int64_t size, int64_t first, int step, bool aligned,
                                               Vec4<T> (&fours)[kCount]) {
  row = Global(row);
  if (aligned && first - first % step + kCount * step <= size) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) fours[i] = *reinterpret_cast<const Vec4<T>*>(row + first + i * step);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) {
      const int64_t at = first + i * step + c;
      fours[i].at[c] = at < size ? row[at] : T{};
    }
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void StoreVec4s(const Vec4<T> (&fours)[kCount], const Vec4s<T>& to) {
  T* const first = Global(to.first);
  if (to.by_fours) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < to.end && to.columns > 0) *reinterpret_cast<Vec4<T>*>(first + i * to.step) = fours[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) {
      if (i < to.end && c < to.columns) first[i * to.step + c] = fours[i].at[c];
    }
  }
}

}  // namespace precondor::cuda
