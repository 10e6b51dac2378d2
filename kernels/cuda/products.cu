// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/product_tile.h"
#include "kernels/cuda/products.h"

namespace precondor::cuda {
namespace {

using product::Finish;
using product::kAcross;
using product::kHeld;
using product::kSide;
using product::kThreads;
using product::LoadSlab;
using product::OutputTile;
using product::OutputTileOf;
using product::Squares;
using product::SumSquares;
using product::TilesAlong;
using product::WithLayout;

[[maybe_unused]] constexpr int kBlocks = 4;  // number of blocks that share a multiprocessor
constexpr int kDepth = product::kGranule;    // inner indices of a slab
constexpr int kFours = kSide * kDepth / (static_cast<int>(kThreads) * kFour);

// A slab of an operand, inner index first. The padding keeps columns in different banks, and rows aligned for what a
// thread reads at once.
struct alignas(sizeof(Vec4<float>)) Slab {
  float at[kDepth][kSide + kHeld];
};

// Returns the fours of an operand that a thread copies to the slab. kAlong: the operand's rows run along the inner
// dimension. In both cases neighbours in a warp are neighbours in memory.
template <bool kAlong>
__device__ __forceinline__ Vec4Position PlaceInSlab() {
  const int thread = static_cast<int>(threadIdx.x), across = (kAlong ? kDepth : kSide) / kFour;
  return {thread / across, static_cast<int>(kThreads) / across, thread % across * kFour};
}

template <bool kAlong>
__device__ __forceinline__ void Store(const Vec4<float> (&fours)[kFours], Slab& slab) {
  const Vec4Position place = PlaceInSlab<kAlong>();
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int row = place.row + i * place.step;
    if constexpr (kAlong) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) slab.at[place.column + c][row] = fours[i].at[c];
    } else {
      *reinterpret_cast<Vec4<float>*>(&slab.at[row][place.column]) = fours[i];
    }
  }
}

// Sets `sums` to the thread's elements of op(a) op(b), slab by slab along the inner dimension. While a block multiplies
// a slab of each operand, its loads of the next two are in flight.
template <bool kAlongA, bool kAlongB>
__device__ __forceinline__ void Multiply(const ProductJob& job, const OutputTile& place, Slab& a, Slab& b,
                                         float (&sums)[kHeld][kHeld]) {
  const int row_of_thread = static_cast<int>(threadIdx.x) / kAcross * kHeld;
  const int column_of_thread = static_cast<int>(threadIdx.x) % kAcross * kHeld;
  Vec4<float> of_a[kFours], of_b[kFours];
  LoadSlab<kSide, kDepth, kAlongA>(job.a, place.row0, place.begin, PlaceInSlab<kAlongA>(), of_a);
  LoadSlab<kSide, kDepth, kAlongB>(job.b, place.column0, place.begin, PlaceInSlab<kAlongB>(), of_b);
  for (int64_t k0 = place.begin; k0 < place.end; k0 += kDepth) {
    __syncthreads();  // waits until no thread reads the previous slabs
    Store<kAlongA>(of_a, a);
    Store<kAlongB>(of_b, b);
    __syncthreads();
    if (k0 + kDepth < place.end) {
      LoadSlab<kSide, kDepth, kAlongA>(job.a, place.row0, k0 + kDepth, PlaceInSlab<kAlongA>(), of_a);
      LoadSlab<kSide, kDepth, kAlongB>(job.b, place.column0, k0 + kDepth, PlaceInSlab<kAlongB>(), of_b);
    }
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      const Vec4<float> left = *reinterpret_cast<const Vec4<float>*>(&a.at[k][row_of_thread]);
      const Vec4<float> right = *reinterpret_cast<const Vec4<float>*>(&b.at[k][column_of_thread]);
      for (int i = 0; i < kHeld; ++i) {
        for (int j = 0; j < kHeld; ++j) sums[i][j] = fmaf(left.at[i], right.at[j], sums[i][j]);
      }
    }
  }
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, kBlocks) ProductKernel(Jobs jobs, int64_t blocks) {
  __shared__ Slab slabs[2];
  __shared__ OutputTile place;  // shared, to save registers
  __shared__ Share share;
  Slab &a = slabs[0], &b = slabs[1];
  constexpr bool kInParts = std::is_same_v<Jobs, ManyJobs<ProductJob>>;  // jobs may have parts or squares
  if (threadIdx.x == 0) share = ShareOf(blocks);
  __syncthreads();
  for (unsigned block = share.begin; block < share.end; ++block) {
    const ProductJob& job = jobs.InShared(share, block);
    __syncthreads();  // waits until no thread reads the previous place
    if (threadIdx.x == 0) place = OutputTileOf<kSide, kSide>(job, block - job.first);
    __syncthreads();
    float sums[kHeld][kHeld] = {};
    WithLayout(job, [&](auto along_a, auto along_b) {
      Multiply<decltype(along_a)::value, decltype(along_b)::value>(job, place, a, b, sums);
    });
    Squares squares;
    Finish<kInParts>(job, place, sums, squares);
    if (kInParts && job.squares != nullptr) {
      SumSquares(job, place.tile, TilesAlong(job.c.rows, kSide) * TilesAlong(job.c.cols, kSide), squares);
    }
  }
}

}  // namespace

int64_t ProductTiles(ConstMatrixView c) { return int64_t{TilesAlong(c.rows, kSide)} * TilesAlong(c.cols, kSide); }

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
