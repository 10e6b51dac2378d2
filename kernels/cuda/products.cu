// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda {
namespace {

// 16 x 16 threads; each makes 4 x 4 elements of the block's 64 x 64.
constexpr unsigned kThreads = 256;
constexpr int kAcross = 16;
constexpr int kHeld = 4;
constexpr int kSide = kAcross * kHeld;
constexpr int kDepth = 16;  // of the inner dimension at once
constexpr int kLoads = kSide * kDepth / static_cast<int>(kThreads);

// Part of an operand, inner index first. The padding keeps columns out of each other's banks, and rows aligned for
// what a thread reads at once.
struct Slab {
  float at[kDepth][kSide + kHeld];
};

// x's elements (line, k) for `lines` from line0 on and the inner indices from k0 on, zero beyond x. `along` says
// whether x's rows run along the inner dimension: neighbours in a warp are neighbours in memory either way.
__device__ void Load(ConstMatrixView x, bool along, int64_t line0, int64_t k0, Slab& slab) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lines = static_cast<int>(std::min<int64_t>(kSide, (along ? x.rows : x.cols) - line0));
  const int inner = static_cast<int>(std::min<int64_t>(kDepth, (along ? x.cols : x.rows) - k0));
  const float* const from = along ? &x.at(line0, k0) : &x.at(k0, line0);
  for (int load = 0; load < kLoads; ++load) {
    const int line = along ? thread / kDepth + load * kAcross : thread % kSide;
    const int k = along ? thread % kDepth : thread / kSide + load * kHeld;
    const bool inside = line < lines && k < inner;
    slab.at[k][line] = inside ? from[along ? line * x.stride + k : k * x.stride + line] : 0.0f;
  }
}

// What a block works at: rows and columns from row0 and column0 on, inner indices [begin, end).
struct Place {
  unsigned tile, part;
  int64_t row0, column0, begin, end;
};

__device__ Place PlaceOf(const ProductJob& job, int64_t block) {
  const unsigned parts = static_cast<unsigned>(job.parts), number = static_cast<unsigned>(block);
  const unsigned across = static_cast<unsigned>((job.c.cols + kSide - 1) / kSide);
  const unsigned tile = number / parts, part = number % parts;
  const int64_t slabs = (job.inner + kDepth - 1) / kDepth, deep = (slabs + parts - 1) / parts * kDepth;
  const int64_t row0 = int64_t{tile / across} * kSide, column0 = int64_t{tile % across} * kSide;
  return {tile, part, row0, column0, part * deep, std::min(job.inner, (part + 1) * deep)};
}

// Of all parts in their order, in the last block of the tile's; false in all others, which are done.
__device__ bool SumParts(const ProductJob& job, const Place& place, float (&sums)[kHeld][kHeld]) {
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
__device__ void SumSquares(const ProductJob& job, const Place& place, double of_source, double of_c) {
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

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 4) ProductKernel(Jobs jobs, int64_t blocks) {
  __shared__ Slab a, b;
  const int row_of_thread = static_cast<int>(threadIdx.x) / kAcross * kHeld;
  const int column_of_thread = static_cast<int>(threadIdx.x) % kAcross * kHeld;
  constexpr bool kInParts = std::is_same_v<Jobs, ManyJobs<ProductJob>>;  // may be, or have squares
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ProductJob& job = jobs.Of(block);
    const Place place = PlaceOf(job, block - job.first);
    float sums[kHeld][kHeld] = {};
    for (int64_t k0 = place.begin; k0 < place.end; k0 += kDepth) {
      __syncthreads();  // whoever still reads what lies there
      Load(job.a, !job.transpose_a, place.row0, k0, a);
      Load(job.b, job.transpose_b, place.column0, k0, b);
      __syncthreads();
      for (int k = 0; k < kDepth; ++k) {
        float of_a[kHeld], of_b[kHeld];
        for (int i = 0; i < kHeld; ++i) of_a[i] = a.at[k][row_of_thread + i];
        for (int j = 0; j < kHeld; ++j) of_b[j] = b.at[k][column_of_thread + j];
        for (int i = 0; i < kHeld; ++i) {
          for (int j = 0; j < kHeld; ++j) sums[i][j] = fmaf(of_a[i], of_b[j], sums[i][j]);
        }
      }
    }
    if (kInParts && job.parts > 1 && !SumParts(job, place, sums)) continue;
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
}

}  // namespace

int64_t ProductTiles(ConstMatrixView c) { return ((c.rows + kSide - 1) / kSide) * ((c.cols + kSide - 1) / kSide); }

int ProductParts(ConstMatrixView c, int64_t inner) {
  constexpr int64_t kMostBlocks = 64, kLeastInner = 256;
  const int64_t most = kMostBlocks / std::max<int64_t>(ProductTiles(c), 1),
                wanted = (inner + kLeastInner - 1) / kLeastInner;
  return static_cast<int>(std::max<int64_t>(std::min(most, wanted), 1));
}

int64_t ProductPartials(ConstMatrixView c, int64_t inner) {
  const int parts = ProductParts(c, inner);
  return parts == 1 ? 0 : ProductTiles(c) * parts * kSide * kSide;
}

cudaError_t Product(cudaStream_t stream, const ProductJob& job) {
  return LaunchJobs(stream, ProductBlocks(job), kThreads, ProductKernel<OneJob<ProductJob>>, OneJob<ProductJob>{job});
}

cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, ProductKernel<ManyJobs<ProductJob>>, ManyJobs<ProductJob>{jobs, count});
}

}  // namespace precondor::cuda
