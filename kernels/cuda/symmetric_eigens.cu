// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/launch.h"
#include "kernels/cuda/symmetric_eigens.h"

namespace precondor::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) WidenSymmetricKernel(const SymmetricEigenJob* jobs) {
  const SymmetricEigenJob job = jobs[blockIdx.x];
  const int n = static_cast<int>(job.a.rows), thread = static_cast<int>(threadIdx.x);
  __shared__ bool finite;
  if (thread == 0) finite = true;
  __syncthreads();
  for (int at = thread; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n;
    if (j <= i && !isfinite(job.a.at(i, j))) finite = false;
  }
  __syncthreads();
  if (thread == 0) *job.outcome = finite ? 0 : -1;
  for (int at = thread; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n;
    job.wide[at] = !finite ? 0.0 : j <= i ? job.a.at(i, j) : job.a.at(j, i);
  }
}

__global__ void __launch_bounds__(kThreads) NarrowEigenvectorsKernel(const SymmetricEigenJob* jobs) {
  const SymmetricEigenJob job = jobs[blockIdx.x];
  const int n = static_cast<int>(job.q.rows);
  const bool decomposed = *job.outcome == 0 && *job.info == 0;
  __syncthreads();  // all have read the outcome
  if (threadIdx.x == 0 && *job.info != 0 && *job.outcome == 0) *job.outcome = *job.info;
  if (!decomposed) return;
  for (int at = static_cast<int>(threadIdx.x); at < n * n; at += kThreads) {
    job.q.at(at / n, at % n) = static_cast<float>(job.wide[at]);
  }
}

}  // namespace

cudaError_t WidenSymmetric(cudaStream_t stream, const SymmetricEigenJob* jobs, int count) {
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), WidenSymmetricKernel, jobs);
}

cudaError_t NarrowEigenvectors(cudaStream_t stream, const SymmetricEigenJob* jobs, int count) {
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), NarrowEigenvectorsKernel, jobs);
}

}  // namespace precondor::cuda
