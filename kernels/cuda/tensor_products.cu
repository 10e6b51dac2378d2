// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cuda_bf16.h>
#include <mma.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/product_tile.h"

namespace precondor::cuda {
namespace {

namespace wmma = nvcuda::wmma;
using product::Finish;
using product::kAcross;
using product::kHeld;
using product::kSide;
using product::kThreads;
using product::Place;
using product::PlaceOf;

constexpr int kDepth = product::kGranule;  // of the inner dimension at once
constexpr int kFragment = 16;              // side of what a warp multiplies at once
constexpr int kPieces = 2;                 // fragments of 16 x 16 sums that a warp has beside each other
constexpr int kLoads = kSide * kDepth / static_cast<int>(kThreads);
// The padding keeps rows out of each other's banks, and where fragments begin aligned as they must be.
constexpr int kSlabStride = kDepth + 8;
constexpr int kSumStride = kSide + 4;

// Part of an operand, the inner index last: what its elements round to, and what that leaves of them.
struct Slab {
  __nv_bfloat16 high[kSide * kSlabStride];
  __nv_bfloat16 low[kSide * kSlabStride];
};
struct Slabs {
  Slab a, b;
};
union alignas(32) Memory {  // as fragments are loaded from
  Slabs slabs;
  float sums[kSide * kSumStride];
};

using Left = wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, __nv_bfloat16, wmma::row_major>;
using Right = wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, __nv_bfloat16, wmma::col_major>;
using Sums = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;

// As in products.cu.
__device__ void Load(ConstMatrixView x, bool along, int64_t line0, int64_t k0, bool in_two_terms, Slab& slab) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lines = static_cast<int>(std::min<int64_t>(kSide, (along ? x.rows : x.cols) - line0));
  const int inner = static_cast<int>(std::min<int64_t>(kDepth, (along ? x.cols : x.rows) - k0));
  const float* const from = along ? &x.at(line0, k0) : &x.at(k0, line0);
  constexpr int kLinesAtOnce = static_cast<int>(kThreads) / kDepth, kInnerAtOnce = static_cast<int>(kThreads) / kSide;
  for (int load = 0; load < kLoads; ++load) {
    const int line = along ? thread / kDepth + load * kLinesAtOnce : thread % kSide;
    const int k = along ? thread % kDepth : thread / kSide + load * kInnerAtOnce;
    const bool inside = line < lines && k < inner;
    const float value = inside ? from[along ? line * x.stride + k : k * x.stride + line] : 0.0f;
    const __nv_bfloat16 high = __float2bfloat16_rn(value);
    slab.high[line * kSlabStride + k] = high;
    if (in_two_terms) slab.low[line * kSlabStride + k] = __float2bfloat16_rn(value - __bfloat162float(high));
  }
}

// A warp makes 16 x 32 of the block's 64 x 64 elements.
__global__ void __launch_bounds__(kThreads, 4) TensorProductKernel(ManyJobs<ProductJob> jobs, int64_t blocks) {
  __shared__ Memory memory;
  __shared__ Place place;  // registers are few
  Slab &a = memory.slabs.a, &b = memory.slabs.b;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / static_cast<int>(kWarp);
  const int warp_row = warp % (kSide / kFragment) * kFragment;
  const int warp_column = warp / (kSide / kFragment) * kPieces * kFragment;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ProductJob& job = jobs.Of(block);
    __syncthreads();  // whoever still looks there
    if (thread == 0) place = PlaceOf(job, block - job.first);
    __syncthreads();
    Sums parts[kPieces];
    for (Sums& part : parts) wmma::fill_fragment(part, 0.0f);
    for (int64_t k0 = place.begin; k0 < place.end; k0 += kDepth) {
      __syncthreads();  // whoever still reads what lies there
      Load(job.a, !job.transpose_a, place.row0, k0, job.in_two_terms, a);
      Load(job.b, job.transpose_b, place.column0, k0, job.in_two_terms, b);
      __syncthreads();
      for (int k = 0; k < kDepth; k += kFragment) {
        Left left;
        Right right;
        wmma::load_matrix_sync(left, a.high + warp_row * kSlabStride + k, kSlabStride);
        for (int piece = 0; piece < kPieces; ++piece) {
          const int at = (warp_column + piece * kFragment) * kSlabStride + k;
          wmma::load_matrix_sync(right, b.high + at, kSlabStride);
          wmma::mma_sync(parts[piece], left, right, parts[piece]);
          if (!job.in_two_terms) continue;
          wmma::load_matrix_sync(right, b.low + at, kSlabStride);
          wmma::mma_sync(parts[piece], left, right, parts[piece]);
        }
        if (!job.in_two_terms) continue;
        wmma::load_matrix_sync(left, a.low + warp_row * kSlabStride + k, kSlabStride);
        for (int piece = 0; piece < kPieces; ++piece) {
          const int at = (warp_column + piece * kFragment) * kSlabStride + k;
          wmma::load_matrix_sync(right, b.high + at, kSlabStride);
          wmma::mma_sync(parts[piece], left, right, parts[piece]);
        }
      }
    }
    __syncthreads();  // all have done with the slabs
    for (int piece = 0; piece < kPieces; ++piece) {
      float* const to = memory.sums + warp_row * kSumStride + warp_column + piece * kFragment;
      wmma::store_matrix_sync(to, parts[piece], kSumStride, wmma::mem_row_major);
    }
    __syncthreads();
    float sums[kHeld][kHeld];
    for (int i = 0; i < kHeld; ++i) {
      for (int j = 0; j < kHeld; ++j) {
        sums[i][j] = memory.sums[(thread / kAcross * kHeld + i) * kSumStride + thread % kAcross * kHeld + j];
      }
    }
    Finish<true>(job, place, sums);
  }
}

}  // namespace

cudaError_t TensorProducts(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, TensorProductKernel, ManyJobs<ProductJob>{jobs, count});
}

}  // namespace precondor::cuda
