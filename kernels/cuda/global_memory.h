// SPDX-License-Identifier: Apache-2.0
// How kernels read and write device memory: many loads of a thread at once, and four neighbours at a time where they
// are aligned. For .cu files alone.
//
// A pointer that comes from a table of jobs is generic: the compiler takes a store through one for a change of what
// any other points to, and keeps each later load behind it. So a kernel loads all that it needs into registers first,
// and stores afterwards.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// p, which the compiler may take for an address in device memory.
template <typename T>
__device__ __forceinline__ T* Global(T* p) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// What a thread loads or stores at once.
constexpr int kFour = 4;
template <typename T>
struct alignas(kFour * sizeof(T)) Four {
  T at[kFour];
};

// Which elements of a block's patch of a matrix a thread moves: in rows row, row + step, ..., the four columns from
// `column` on, a multiple of 4.
struct FoursPlace {
  int row, step, column;
};

// A thread's elements: fours that lie `step` elements apart. Those before `end` of `count` exist, and of each the first
// `columns`. by_fours: all are aligned, and columns is 4 or more, or none.
template <typename T>
struct Fours {
  T* first;
  int64_t step;
  int end, columns;
  bool by_fours;
};

// Whether fours of a matrix are aligned, and each is wholly inside or outside a patch of so many columns. A thread
// moves the same elements either way, so that no sum depends on it. All threads of a block take the same path.
template <typename T>
__device__ __forceinline__ bool MovesByFours(const T* data, int64_t stride, int columns) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride * sizeof(T))) % sizeof(Four<T>) == 0 &&
         columns % kFour == 0;
}

// How many of first, first + step, ... are below `limit`.
__device__ __forceinline__ int CountBelow(int limit, int first, int step) { return (limit - first + step - 1) / step; }

// data + offset. The data of a matrix without elements may be null, from which C++ on the host allows no step; a test
// for that costs registers, which some kernels lack, and on the device nothing reads such an address.
template <typename T>
__device__ __forceinline__ T* At(T* data, int64_t offset) {
#ifdef __CUDA_ARCH__
  return data + offset;
#else
  return data == nullptr ? data : data + offset;
#endif
}

// A thread's elements of the patch of at most kRows x kColumns at (row, column) of x.
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ Fours<T> FoursOf(const BasicMatrixView<T>& x, int64_t row, int64_t column, FoursPlace at) {
  const int64_t rows_left = x.rows - row, columns_left = x.cols - column;
  const int rows = static_cast<int>(rows_left < kRows ? rows_left : kRows);
  const int columns = static_cast<int>(columns_left < kColumns ? columns_left : kColumns);
  return {At(x.data, (row + at.row) * x.stride + column + at.column), at.step * x.stride,
          CountBelow(rows, at.row, at.step), columns - at.column, MovesByFours(x.data, x.stride, columns)};
}

// Zero where there are none. All loads are issued before the first is waited for.
template <int kCount, typename T>
__device__ __forceinline__ void LoadFours(const Fours<const T>& from, Four<T> (&fours)[kCount]) {
  const T* const first = Global(from.first);
  if (from.by_fours) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      fours[i] = Four<T>{};
      if (i < from.end && from.columns > 0) fours[i] = *reinterpret_cast<const Four<T>*>(first + i * from.step);
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

// Fours that lie `step` elements apart, from `first` on, of a row of `size` elements; zero beyond it. `aligned`: every
// row's fours are. The thread's place in a run of `step` elements is first % step.
template <int kCount, typename T>
__device__ __forceinline__ void LoadFoursOfRow(const T* row, int64_t size, int64_t first, int step, bool aligned,
                                               Four<T> (&fours)[kCount]) {
  row = Global(row);
  if (aligned && first - first % step + kCount * step <= size) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) fours[i] = *reinterpret_cast<const Four<T>*>(row + first + i * step);
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
__device__ __forceinline__ void StoreFours(const Four<T> (&fours)[kCount], const Fours<T>& to) {
  T* const first = Global(to.first);
  if (to.by_fours) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < to.end && to.columns > 0) *reinterpret_cast<Four<T>*>(first + i * to.step) = fours[i];
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
