// SPDX-License-Identifier: Apache-2.0
// Products of a warp's fragments (mma.h's nvcuda::wmma), as far as kernels/cuda uses them: 16 x 16 x 16 of bf16 with
// f32 sums. Each lane holds all of both factors and adds up eight of the sums; which ones a device does not say.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_bf16.h>
#include <type_traits>

#include "tests/support/cuda_host/grid.h"

// By the library's names: NOLINTBEGIN(readability-identifier-naming)
namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int kRows, int kColumns, int kInner, typename T, typename Layout = void>
struct fragment;
template <typename Use, typename Layout>
struct fragment<Use, 16, 16, 16, __nv_bfloat16, Layout> {
  float all[16][16];  // row by row
};
template <>
struct fragment<accumulator, 16, 16, 16, float> {
  float x[8];
};
using Sums = fragment<accumulator, 16, 16, 16, float>;

// A device reads 32 bytes at a time, and rows that lie so that it may.
inline void CheckPlace(const void* data, unsigned stride_bytes) {
  if (reinterpret_cast<uintptr_t>(data) % 32 == 0 && stride_bytes % 16 == 0) return;
  std::fprintf(stderr, "wmma: expected data at 32 bytes and a stride of 16, got %p and %u\n", data, stride_bytes);
  std::abort();
}

inline void fill_fragment(Sums& sums, float value) {
  for (float& x : sums.x) x = value;
}

template <typename Use, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, __nv_bfloat16, Layout>& to, const __nv_bfloat16* from,
                      unsigned stride) {
  CheckPlace(from, stride * 2);
  constexpr bool kByRows = std::is_same_v<Layout, row_major>;
  for (unsigned i = 0; i < 16; ++i) {
    for (unsigned j = 0; j < 16; ++j) to.all[i][j] = __bfloat162float(from[kByRows ? i * stride + j : j * stride + i]);
  }
}

template <typename LayoutA, typename LayoutB>
void mma_sync(Sums& d, const fragment<matrix_a, 16, 16, 16, __nv_bfloat16, LayoutA>& a,
              const fragment<matrix_b, 16, 16, 16, __nv_bfloat16, LayoutB>& b, const Sums& c) {
  const unsigned row = ::precondor::cuda_host::CurrentLane() / 2,
                 column = ::precondor::cuda_host::CurrentLane() % 2 * 8;
  for (unsigned i = 0; i < 8; ++i) {
    float sum = c.x[i];
    for (unsigned k = 0; k < 16; ++k) sum += a.all[row][k] * b.all[k][column + i];
    d.x[i] = sum;
  }
}

inline void store_matrix_sync(float* to, const Sums& sums, unsigned stride, layout_t layout) {
  CheckPlace(to, stride * 4);
  ::precondor::cuda_host::WaitForWarp(__FILE__, __LINE__);  // all lanes of a warp come here
  const unsigned row = ::precondor::cuda_host::CurrentLane() / 2,
                 column = ::precondor::cuda_host::CurrentLane() % 2 * 8;
  for (unsigned i = 0; i < 8; ++i) {
    to[layout == mem_row_major ? row * stride + column + i : (column + i) * stride + row] = sums.x[i];
  }
}

}  // namespace nvcuda::wmma
// NOLINTEND(readability-identifier-naming)
