// SPDX-License-Identifier: Apache-2.0
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
  const int64_t lines = along ? x.rows : x.cols, inner = along ? x.cols : x.rows;
  for (int load = 0; load < kLoads; ++load) {
    const int line = along ? thread / kDepth + load * kAcross : thread % kSide;
    const int k = along ? thread % kDepth : thread / kSide + load * kHeld;
    const bool inside = line0 + line < lines && k0 + k < inner;
    slab.at[k][line] = !inside ? 0.0f : along ? x.at(line0 + line, k0 + k) : x.at(k0 + k, line0 + line);
  }
}

template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 4) ProductKernel(Jobs jobs, int64_t blocks) {
  __shared__ Slab a, b;
  const int row_of_thread = static_cast<int>(threadIdx.x) / kAcross * kHeld;
  const int column_of_thread = static_cast<int>(threadIdx.x) % kAcross * kHeld;
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ProductJob& job = jobs.Of(block);
    const int64_t across = (job.c.cols + kSide - 1) / kSide, part = block - job.first;
    const int64_t row0 = part / across * kSide, column0 = part % across * kSide;
    float sums[kHeld][kHeld] = {};
    for (int64_t k0 = 0; k0 < job.inner; k0 += kDepth) {
      __syncthreads();  // whoever still reads what lies there
      Load(job.a, !job.transpose_a, row0, k0, a);
      Load(job.b, job.transpose_b, column0, k0, b);
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
    for (int i = 0; i < kHeld; ++i) {
      for (int j = 0; j < kHeld; ++j) {
        const int64_t row = row0 + row_of_thread + i, column = column0 + column_of_thread + j;
        if (row >= job.c.rows || column >= job.c.cols) continue;
        const float product = job.alpha * sums[i][j];
        float& c = job.c.at(row, column);
        c = job.beta != 0.0f ? fmaf(job.beta, c, product) : product;
      }
    }
  }
}

}  // namespace

int64_t ProductBlocks(MatrixView c) { return ((c.rows + kSide - 1) / kSide) * ((c.cols + kSide - 1) / kSide); }

cudaError_t Product(cudaStream_t stream, const ProductJob& job) {
  return LaunchJobs(stream, ProductBlocks(job.c), kThreads, ProductKernel<OneJob<ProductJob>>, OneJob<ProductJob>{job});
}

cudaError_t Products(cudaStream_t stream, const ProductJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, ProductKernel<ManyJobs<ProductJob>>, ManyJobs<ProductJob>{jobs, count});
}

}  // namespace precondor::cuda
