// SPDX-License-Identifier: Apache-2.0
// What kernels of products have in common: which elements a block makes, and what becomes of its sums. For .cu files
// alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/block_reduce.h"
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
  const int row_of_thread = static_cast<int>(threadIdx.x) / kAcross * kHeld;
  const int column_of_thread = static_cast<int>(threadIdx.x) % kAcross * kHeld;
  double of_source = 0, of_c = 0;
  for (int i = 0; i < kHeld; ++i) {
    for (int j = 0; j < kHeld; ++j) {
      const int64_t row = place.row0 + row_of_thread + i, column = place.column0 + column_of_thread + j;
      if (row >= job.c.rows || column >= job.c.cols) continue;
      float c = job.alpha * sums[i][j];
      if (job.beta != 0.0f || (kInParts && job.squares != nullptr)) {
        const float source = job.source.at(row, column);
        if (job.beta != 0.0f) c = fmaf(job.beta, source, c);
        of_source += double{source} * source;
      }
      job.c.at(row, column) = c;
      of_c += double{c} * c;
    }
  }
  if (kInParts && job.squares != nullptr) SumSquares(job, place, of_source, of_c);
}

}  // namespace precondor::cuda::product
