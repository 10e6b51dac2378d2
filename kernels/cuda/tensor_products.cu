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
using product::LoadSlab;
using product::Place;
using product::PlaceOf;
using product::WithLayout;

// Blocks that share a multiprocessor. For sm_80 the compiler needs a few registers more than four leave.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = 3;
#else
[[maybe_unused]] constexpr int kBlocks = 4;
#endif
constexpr int kDepth = product::kGranule;  // of the inner dimension at once
constexpr int kFragment = 16;              // side of what a warp multiplies at once
constexpr int kPieces = 2;                 // fragments of 16 x 16 sums that a warp has beside each other
constexpr int kFours = kSide * kDepth / (static_cast<int>(kThreads) * kFour);
// The padding keeps rows out of each other's banks, and where fragments begin aligned as they must be.
constexpr int kSlabStride = kDepth + 8;
constexpr int kSumStride = kSide + 4;

struct alignas(2 * sizeof(__nv_bfloat16)) Two {
  __nv_bfloat16 at[2];
};

// Part of an operand, the inner index last: what its elements round to, and what that leaves of them.
struct Slab {
  __nv_bfloat16 high[kSide * kSlabStride];
  __nv_bfloat16 low[kSide * kSlabStride];
};
struct SlabPair {
  Slab a, b;
};
union alignas(32) Memory {  // as fragments are loaded from
  SlabPair slabs;
  float sums[kSide * kSumStride];
};

using Left = wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, __nv_bfloat16, wmma::row_major>;
using Right = wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, __nv_bfloat16, wmma::col_major>;
using Sums = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;

// The fours of an operand that a thread brings to the slab. Where the operand's rows run along the inner dimension,
// they are four inner indices of two lines; otherwise four lines at two neighbouring inner indices, which are stored as
// one.
template <bool kAlong>
__device__ __forceinline__ FoursPlace PlaceInSlab() {
  static_assert(kFours == 2 && kDepth == 32 && kSide == 64);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / static_cast<int>(kWarp);
  if (kAlong) return {thread / (kDepth / kFour), static_cast<int>(kThreads) / (kDepth / kFour), thread % 8 * kFour};
  return {(thread % 8 + warp % 2 * 8) * 2, 1, (thread / 8 % 4 + warp / 2 * 4) * kFour};
}

__device__ __nv_bfloat16 LowOf(float value) {
  return __float2bfloat16_rn(value - __bfloat162float(__float2bfloat16_rn(value)));
}

// Rounds what the thread has brought, or, where kLow, what rounding leaves of it.
template <bool kLow, bool kAlong>
__device__ __forceinline__ void Store(const Four<float> (&fours)[kFours], __nv_bfloat16* slab) {
  const FoursPlace place = PlaceInSlab<kAlong>();
  const auto round = [](float value) { return kLow ? LowOf(value) : __float2bfloat16_rn(value); };
  if constexpr (kAlong) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      Four<__nv_bfloat16> four;
      for (int c = 0; c < kFour; ++c) four.at[c] = round(fours[i].at[c]);
      const int line = place.row + i * place.step;
      *reinterpret_cast<Four<__nv_bfloat16>*>(slab + line * kSlabStride + place.column) = four;
    }
  } else {
#pragma unroll
    for (int c = 0; c < kFour; ++c) {
      Two two;
      for (int i = 0; i < kFours; ++i) two.at[i] = round(fours[i].at[c]);
      *reinterpret_cast<Two*>(slab + (place.column + c) * kSlabStride + place.row) = two;
    }
  }
}

template <bool kAlong>
__device__ __forceinline__ void Store(const Four<float> (&fours)[kFours], bool in_two_terms, Slab& slab) {
  Store<false, kAlong>(fours, slab.high);
  if (in_two_terms) Store<true, kAlong>(fours, slab.low);
}

// A fragment from 16 lines x 16 inner indices of a slab. wmma::load_matrix_sync would read bf16 through generic
// addresses, which costs more than shared ones.
__device__ __forceinline__ void LoadFragment(Left& left, const __nv_bfloat16* from) {
#ifdef __CUDA_ARCH__
  static_assert(sizeof(left.x) == 4 * sizeof(unsigned));
  auto* const to = reinterpret_cast<unsigned*>(left.x);
  asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "n"(kSlabStride)
               : "memory");
#else
  wmma::load_matrix_sync(left, from, kSlabStride);
#endif
}
__device__ __forceinline__ void LoadFragment(Right& right, const __nv_bfloat16* from) {
#ifdef __CUDA_ARCH__
  static_assert(sizeof(right.x) == 4 * sizeof(unsigned));
  auto* const to = reinterpret_cast<unsigned*>(right.x);
  asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "n"(kSlabStride)
               : "memory");
#else
  wmma::load_matrix_sync(right, from, kSlabStride);
#endif
}

// parts = the warp's 16 x 32 of the block's 64 x 64 elements of op(a) op(b), by slabs of the inner dimension. While a
// block multiplies two slabs, its loads of the next two are on their way.
template <bool kAlongA, bool kAlongB>
__device__ __forceinline__ void Multiply(const ProductJob& job, const Place& place, int warp_row, int warp_column,
                                         SlabPair& slabs, Sums (&parts)[kPieces]) {
  Slab &a = slabs.a, &b = slabs.b;
  const bool in_two_terms = job.in_two_terms;
  Four<float> of_a[kFours], of_b[kFours];
  LoadSlab<kDepth, kAlongA>(job.a, place.row0, place.begin, PlaceInSlab<kAlongA>(), of_a);
  LoadSlab<kDepth, kAlongB>(job.b, place.column0, place.begin, PlaceInSlab<kAlongB>(), of_b);
  for (int64_t k0 = place.begin; k0 < place.end; k0 += kDepth) {
    __syncthreads();  // no thread reads the slabs before any more
    Store<kAlongA>(of_a, in_two_terms, a);
    Store<kAlongB>(of_b, in_two_terms, b);
    __syncthreads();
    if (k0 + kDepth < place.end) {
      LoadSlab<kDepth, kAlongA>(job.a, place.row0, k0 + kDepth, PlaceInSlab<kAlongA>(), of_a);
      LoadSlab<kDepth, kAlongB>(job.b, place.column0, k0 + kDepth, PlaceInSlab<kAlongB>(), of_b);
    }
    for (int k = 0; k < kDepth; k += kFragment) {
      Left left;
      Right right;
      LoadFragment(left, a.high + warp_row * kSlabStride + k);
      for (int piece = 0; piece < kPieces; ++piece) {
        const int at = (warp_column + piece * kFragment) * kSlabStride + k;
        LoadFragment(right, b.high + at);
        wmma::mma_sync(parts[piece], left, right, parts[piece]);
        if (!in_two_terms) continue;
        LoadFragment(right, b.low + at);
        wmma::mma_sync(parts[piece], left, right, parts[piece]);
      }
      if (!in_two_terms) continue;
      LoadFragment(left, a.low + warp_row * kSlabStride + k);
      for (int piece = 0; piece < kPieces; ++piece) {
        const int at = (warp_column + piece * kFragment) * kSlabStride + k;
        LoadFragment(right, b.high + at);
        wmma::mma_sync(parts[piece], left, right, parts[piece]);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks) TensorProductKernel(ManyJobs<ProductJob> jobs, int64_t blocks) {
  __shared__ Memory memory;
  __shared__ Place place;  // registers are few
  SlabPair& slabs = memory.slabs;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / static_cast<int>(kWarp);
  const int warp_row = warp % (kSide / kFragment) * kFragment;
  const int warp_column = warp / (kSide / kFragment) * kPieces * kFragment;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ProductJob& job = jobs.InShared(block);
    if (thread == 0) place = PlaceOf(job, block - job.first);
    __syncthreads();
    Sums parts[kPieces];
    for (Sums& part : parts) wmma::fill_fragment(part, 0.0f);
    WithLayout(job, [&](auto along_a, auto along_b) {
      Multiply<decltype(along_a)::value, decltype(along_b)::value>(job, place, warp_row, warp_column, slabs, parts);
    });
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
