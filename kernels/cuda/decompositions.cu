// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decompositions.h"
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"

namespace precondor::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 8;  // number of elements that a thread loads before it waits for the first
constexpr unsigned kBlocksOfMatrix = 16;

// Calls put(at, load(at)) for each element of an n x n matrix of which the block has a share.
template <typename Load, typename Put>
__device__ __forceinline__ void MoveAll(int64_t n, Load load, Put put) {
  const int64_t step = int64_t{kThreads} * gridDim.y;
  for (int64_t begin = int64_t{blockIdx.y} * kThreads + threadIdx.x; begin < n * n; begin += kTogether * step) {
    decltype(load(begin)) values[kTogether] = {};
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (begin + u * step < n * n) values[u] = load(begin + u * step);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (begin + u * step < n * n) put(begin + u * step, values[u]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) WidenSymmetricKernel(const DecompositionJob* jobs, double* outcomes) {
  const DecompositionJob job = jobs[blockIdx.x];
  const int64_t n = job.a.rows;
  const float* const a = Global(job.a.data);
  const auto lower = [&](int64_t at) {
    const int64_t i = at / n, j = at % n;
    return j <= i ? a[i * job.a.stride + j] : a[j * job.a.stride + i];
  };
  bool all_finite = true;
  MoveAll(n, lower, [&](int64_t at, float value) {
    const bool finite = isfinite(value);
    all_finite = all_finite && finite;
    Global(job.wide)[at] = finite ? double{value} : 0.0;
    if (job.identity != nullptr) Global(job.identity)[at] = at / n == at % n ? 1.0 : 0.0;
  });
  if (!all_finite) outcomes[blockIdx.x] = -1;
}

__global__ void __launch_bounds__(kThreads) NarrowResultsKernel(const DecompositionJob* jobs, double* outcomes) {
  const DecompositionJob job = jobs[blockIdx.x];
  const int64_t n = job.x.rows;
  if (*job.info != 0) {
    if (blockIdx.y == 0 && threadIdx.x == 0 && outcomes[blockIdx.x] == 0) outcomes[blockIdx.x] = *job.info;
    return;
  }
  if (outcomes[blockIdx.x] != 0) return;
  const double* const wide = Global(job.wide);
  MoveAll(
      n, [&](int64_t at) { return wide[job.symmetric && at % n < at / n ? at % n * n + at / n : at]; },
      [&](int64_t at, double value) { job.x.at(at / n, at % n) = static_cast<float>(value); });
}

dim3 Grid(int count) { return dim3(static_cast<unsigned>(count), kBlocksOfMatrix); }

}  // namespace

cudaError_t WidenSymmetric(cudaStream_t stream, const DecompositionJob* jobs, int count, double* outcomes) {
  const cudaError_t error = cudaMemsetAsync(outcomes, 0, sizeof(double) * static_cast<size_t>(count), stream);
  return error != cudaSuccess ? error
                              : Launch(stream, Grid(count), dim3(kThreads), WidenSymmetricKernel, jobs, outcomes);
}

cudaError_t NarrowResults(cudaStream_t stream, const DecompositionJob* jobs, int count, double* outcomes) {
  return Launch(stream, Grid(count), dim3(kThreads), NarrowResultsKernel, jobs, outcomes);
}

}  // namespace precondor::cuda
