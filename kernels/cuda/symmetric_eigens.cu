// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/symmetric_eigens.h"

namespace precondor::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTogether = 8;  // number of elements that a thread loads before it waits for the first

// Calls put(at, load(at)) for each element of an n x n matrix.
template <typename Load, typename Put>
__device__ __forceinline__ void MoveAll(int n, Load load, Put put) {
  for (int begin = static_cast<int>(threadIdx.x); begin < n * n; begin += kTogether * kThreads) {
    decltype(load(begin)) values[kTogether] = {};
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (begin + u * kThreads < n * n) values[u] = load(begin + u * kThreads);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (begin + u * kThreads < n * n) put(begin + u * kThreads, values[u]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) WidenSymmetricKernel(const SymmetricEigenJob* jobs) {
  const SymmetricEigenJob job = jobs[blockIdx.x];
  const int n = static_cast<int>(job.a.rows), thread = static_cast<int>(threadIdx.x);
  __shared__ bool finite;
  if (thread == 0) finite = true;
  __syncthreads();
  const float* const a = Global(job.a.data);
  const auto lower = [&](int at) {
    const int i = at / n, j = at % n;
    return j <= i ? a[i * job.a.stride + j] : a[j * job.a.stride + i];
  };
  bool all_finite = true;
  MoveAll(n, lower, [&](int, float value) { all_finite = all_finite && isfinite(value); });
  if (!all_finite) finite = false;
  __syncthreads();
  if (thread == 0) *job.outcome = finite ? 0 : -1;
  const bool valid = finite;
  MoveAll(n, lower, [&](int at, float value) { Global(job.wide)[at] = valid ? double{value} : 0.0; });
}

__global__ void __launch_bounds__(kThreads) NarrowEigenvectorsKernel(const SymmetricEigenJob* jobs) {
  const SymmetricEigenJob job = jobs[blockIdx.x];
  const int n = static_cast<int>(job.q.rows);
  const bool decomposed = *job.outcome == 0 && *job.info == 0;
  __syncthreads();  // waits until all threads have read the outcome
  if (threadIdx.x == 0 && *job.info != 0 && *job.outcome == 0) *job.outcome = *job.info;
  if (!decomposed) return;
  const double* const wide = Global(job.wide);
  MoveAll(
      n, [&](int at) { return wide[at]; },
      [&](int at, double value) { job.q.at(at / n, at % n) = static_cast<float>(value); });
}

}  // namespace

cudaError_t WidenSymmetric(cudaStream_t stream, const SymmetricEigenJob* jobs, int count) {
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), WidenSymmetricKernel, jobs);
}

cudaError_t NarrowEigenvectors(cudaStream_t stream, const SymmetricEigenJob* jobs, int count) {
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), NarrowEigenvectorsKernel, jobs);
}

}  // namespace precondor::cuda
