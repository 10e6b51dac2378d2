// SPDX-License-Identifier: Apache-2.0
// What kernels of products have in common: which elements a block makes, and what becomes of its sums. For .cu files
// alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda::product {

// 16 x 16 threads; each makes 4 x 4 elements of the block's 64 x 64.
constexpr unsigned kThreads = 256;
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kSide = kAcross * kHeld;
constexpr int kGranule = 32;  // parts of the inner dimension are multiples of it

// What a block works at: rows and columns from row0 and column0 on, inner indices [begin, end).
struct Place {
  unsigned tile, part;
  int64_t row0, column0, begin, end;
};

__device__ inline Place PlaceOf(const ProductJob& job, int64_t block) {
  const unsigned parts = static_cast<unsigned>(job.parts), number = static_cast<unsigned>(block);
  const unsigned across = static_cast<unsigned>((job.c.cols + kSide - 1) / kSide);
  const unsigned tile = number / parts, part = number % parts;
  const int64_t slabs = (job.inner + kGranule - 1) / kGranule, deep = (slabs + parts - 1) / parts * kGranule;
  const int64_t row0 = int64_t{tile / across} * kSide, column0 = int64_t{tile % across} * kSide;
  return {tile, part, row0, column0, part * deep, std::min(job.inner, (part + 1) * deep)};
}

// The thread's fours of an operand's slab: kSide lines from line0 on x kDepth inner indices from k0 on, where the
// operand's rows run along the inner dimension (kAlong), or the transpose. Zero beyond x.
template <int kDepth, bool kAlong, int kCount>
__device__ __forceinline__ void LoadSlab(const ConstMatrixView& x, int64_t line0, int64_t k0, FoursPlace at,
                                         Four<float> (&fours)[kCount]) {
  if constexpr (kAlong) {
    LoadFours(FoursOf<kSide, kDepth>(x, line0, k0, at), fours);
  } else {
    LoadFours(FoursOf<kDepth, kSide>(x, k0, line0, at), fours);
  }
}

// f with, as a type's value each, whether the rows of a and of b run along the inner dimension: the loops for each of
// the four cases are compiled apart, which takes fewer registers.
template <typename Function>
__device__ __forceinline__ void WithLayout(const ProductJob& job, Function f) {
  if (!job.transpose_a) {
    job.transpose_b ? f(std::true_type(), std::true_type()) : f(std::true_type(), std::false_type());
  } else {
    job.transpose_b ? f(std::false_type(), std::true_type()) : f(std::false_type(), std::false_type());
  }
}

// Of all parts in their order, in the last block of the tile's; false in all others, which are done.
__device__ inline bool SumParts(const ProductJob& job, const Place& place, float (&sums)[kHeld][kHeld]) {
  float* const tile = job.partials + int64_t{place.tile} * job.parts * kSide * kSide + threadIdx.x;
  for (int i = 0; i < kHeld * kHeld; ++i) {
    tile[(place.part * kHeld * kHeld + i) * kThreads] = sums[i / kHeld][i % kHeld];
  }
  if (!IsLastBlock(job.arrived + place.tile, static_cast<unsigned>(job.parts))) return false;
  for (int i = 0; i < kHeld * kHeld; ++i) {
    float sum = 0;
    for (int part = 0; part < job.parts; ++part) sum += __ldcg(tile + (part * kHeld * kHeld + i) * kThreads);
    sums[i / kHeld][i % kHeld] = sum;
  }
  return true;
}

// |source|^2 and |c|^2 from what each thread has of them; the last block of the product adds the tiles' up.
__device__ inline void SumSquares(const ProductJob& job, const Place& place, double of_source, double of_c) {
  double* const of_tiles = job.tile_squares;
  const int64_t tiles = (job.c.rows + kSide - 1) / kSide * ((job.c.cols + kSide - 1) / kSide);
  of_source = CombineBlock<kThreads>(of_source, Add());
  of_c = CombineBlock<kThreads>(of_c, Add());
  if (threadIdx.x == 0) {
    of_tiles[2 * place.tile] = of_source;
    of_tiles[2 * place.tile + 1] = of_c;
  }
  if (!IsLastBlock(job.squares_arrived, static_cast<unsigned>(tiles))) return;
  of_source = of_c = 0;
  for (int64_t tile = threadIdx.x; tile < tiles; tile += kThreads) {
    of_source += __ldcg(of_tiles + 2 * tile);
    of_c += __ldcg(of_tiles + 2 * tile + 1);
  }
  of_source = CombineBlock<kThreads>(of_source, Add());
  of_c = CombineBlock<kThreads>(of_c, Add());
  if (threadIdx.x == 0) {
    job.squares[0] = of_source;
    job.squares[1] = of_c;
  }
}

// c, given alpha's sums; where kInParts, those of a part.
template <bool kInParts>
__device__ void Finish(const ProductJob& job, const Place& place, float (&sums)[kHeld][kHeld]) {
  if (kInParts && job.parts > 1 && !SumParts(job, place, sums)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const FoursPlace at = {thread / kAcross * kHeld, 1, thread % kAcross * kHeld};
  double of_source = 0, of_c = 0;
  Four<float> c[kHeld] = {};  // the source first
  if (job.beta != 0.0f || (kInParts && job.squares != nullptr)) {
    LoadFours(FoursOf<kSide, kSide>(job.source, place.row0, place.column0, at), c);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {  // beyond c the sum and the source are 0
      const float source = c[i].at[j], product = job.alpha * sums[i][j];
      c[i].at[j] = job.beta != 0.0f ? fmaf(job.beta, source, product) : product;
      if (!kInParts) continue;
      of_source += double{source} * source;
      of_c += double{c[i].at[j]} * c[i].at[j];
    }
  }
  StoreFours(c, FoursOf<kSide, kSide>(job.c, place.row0, place.column0, at));
  if (kInParts && job.squares != nullptr) SumSquares(job, place, of_source, of_c);
}

}  // namespace precondor::cuda::product
