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
using product::Place;
using product::PlaceOf;

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
    Finish<kInParts>(job, place, sums);
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
