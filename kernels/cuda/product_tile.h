// SPDX-License-Identifier: Apache-2.0
// Common parts of the kernels for products: which elements a block computes, and how sums become results. Include it in
// .cu files only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda::product {

// A block has 16 x 16 threads. Each thread computes 4 x 4 of the block's 64 x 64 elements.
constexpr unsigned kThreads = 256;
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kSide = kAcross * kHeld;
constexpr int kGranule = 32;  // the lengths of parts of the inner dimension are multiples of it

// The work of a block: one part of one tile of c. The tile begins at (row0, column0), and the part is inner indices
// [begin, end).
struct OutputTile {
  unsigned tile, part;
  int64_t row0, column0, begin, end;
};

__host__ __device__ constexpr unsigned TilesAlong(int64_t size, int side) {
  return static_cast<unsigned>((size + side - 1) / side);
}

// Returns the work of the job's block number `block`, for tiles of kRows x kColumns. The last parts may have no inner
// indices.
template <int kRows, int kColumns>
__device__ OutputTile OutputTileOf(const ProductJob& job, int64_t block) {
  const unsigned parts = static_cast<unsigned>(job.parts), number = static_cast<unsigned>(block);
  const unsigned across = TilesAlong(job.c.cols, kColumns), tile = number / parts, part = number % parts;
  const int64_t slabs = (job.inner + kGranule - 1) / kGranule, deep = (slabs + parts - 1) / parts * kGranule;
  const int64_t row0 = int64_t{tile / across} * kRows, column0 = int64_t{tile % across} * kColumns;
  return {tile, part, row0, column0, std::min(job.inner, part * deep), std::min(job.inner, (part + 1) * deep)};
}

// Loads the thread's fours of a slab of an operand: kLines lines from line0 on x kDepth inner indices from k0 on. If
// kAlong, the rows of x run along the inner dimension and are the lines; otherwise the columns of x are the lines.
// Elements outside x become zero.
template <int kLines, int kDepth, bool kAlong, int kCount>
__device__ __forceinline__ void LoadSlab(const ConstMatrixView& x, int64_t line0, int64_t k0, Vec4Position at,
                                         Vec4<float> (&fours)[kCount]) {
  if constexpr (kAlong) {
    LoadVec4s(Vec4sOf<kLines, kDepth>(x, line0, k0, at), fours);
  } else {
    LoadVec4s(Vec4sOf<kDepth, kLines>(x, k0, line0, at), fours);
  }
}

// Calls f with two constants, std::true_type or std::false_type: whether the rows of a, and those of b, run along the
// inner dimension. The loops of each of the four cases are compiled separately, which takes fewer registers.
template <typename Function>
__device__ __forceinline__ void WithLayout(const ProductJob& job, Function f) {
  if (!job.transpose_a) {
    job.transpose_b ? f(std::true_type(), std::true_type()) : f(std::true_type(), std::false_type());
  } else {
    job.transpose_b ? f(std::false_type(), std::true_type()) : f(std::false_type(), std::false_type());
  }
}

// Stores the sums of this part of the 64 x 64 tile `place.tile`. In the last block of the tile to arrive, sets `sums`
// to the total over all parts, added in their order, and returns true. Returns false in all other blocks, which have no
// more to do for the tile.
__device__ inline bool SumParts(const ProductJob& job, const OutputTile& place, float (&sums)[kHeld][kHeld]) {
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

// Squared lengths of a thread's elements of source and of c.
struct Squares {
  double of_source = 0, of_c = 0;
};

// Adds up `squares` over all threads of the product's blocks, in a fixed order, and sets job.squares in the last block
// to arrive. This is block `number` of `count`, and count is at most ProductTiles(job.c). All threads of the block must
// call it.
__device__ inline void SumSquares(const ProductJob& job, unsigned number, unsigned count, Squares squares) {
  double* const of_blocks = job.tile_squares;
  squares.of_source = CombineBlock<kThreads>(squares.of_source, Add());
  squares.of_c = CombineBlock<kThreads>(squares.of_c, Add());
  if (threadIdx.x == 0) {
    of_blocks[2 * number] = squares.of_source;
    of_blocks[2 * number + 1] = squares.of_c;
  }
  if (!IsLastBlockByFirstThread(job.squares_arrived, count)) return;
  squares = {};
  for (unsigned block = threadIdx.x; block < count; block += kThreads) {
    squares.of_source += __ldcg(of_blocks + 2 * block);
    squares.of_c += __ldcg(of_blocks + 2 * block + 1);
  }
  squares.of_source = CombineBlock<kThreads>(squares.of_source, Add());
  squares.of_c = CombineBlock<kThreads>(squares.of_c, Add());
  if (threadIdx.x == 0) {
    job.squares[0] = squares.of_source;
    job.squares[1] = squares.of_c;
  }
}

// Computes and stores the 64 x 64 elements of tile `place.tile` of c from `sums`, this thread's elements of op(a)
// op(b). If kInParts, the sums may be of one part, and only the last block of the tile stores. If kInParts and the job
// asks for squares, adds to `squares`.
template <bool kInParts>
__device__ void Finish(const ProductJob& job, const OutputTile& place, float (&sums)[kHeld][kHeld], Squares& squares) {
  if (kInParts && job.parts > 1 && !SumParts(job, place, sums)) return;
  const int thread = static_cast<int>(threadIdx.x);
  const Vec4Position at = {thread / kAcross * kHeld, 1, thread % kAcross * kHeld};
  const bool with_squares = kInParts && job.squares != nullptr;
  Vec4<float> c[kHeld] = {};  // first the source, then the result
  if (job.beta != 0.0f || with_squares) {
    LoadVec4s(Vec4sOf<kSide, kSide>(job.source, place.row0, place.column0, at), c);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {  // outside c the sum and the source are 0
      const float source = c[i].at[j], product = job.alpha * sums[i][j];
      c[i].at[j] = job.beta != 0.0f ? fmaf(job.beta, source, product) : product;
      if (!with_squares) continue;
      squares.of_source += double{source} * source;
      squares.of_c += double{c[i].at[j]} * c[i].at[j];
    }
  }
  StoreVec4s(c, Vec4sOf<kSide, kSide>(job.c, place.row0, place.column0, at));
}

}  // namespace precondor::cuda::product
