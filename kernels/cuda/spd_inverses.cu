// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/launch.h"
#include "kernels/cuda/spd_inverses.h"

namespace precondor::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAcross = 16;  // threads of a row of the trailing matrix

// The lower triangle of what is to be inverted; false, in all threads, where an element is not finite.
__device__ bool Widen(const SpdInverseJob& job, double* l) {
  const int n = static_cast<int>(job.x.rows), thread = static_cast<int>(threadIdx.x);
  __shared__ bool finite;
  if (thread == 0) finite = true;
  __syncthreads();
  for (int at = thread; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n;
    if (j > i) continue;
    l[at] = job.roots == nullptr ? job.a.at(i, j)
                                 : (i == j ? 1.0 : 0.0) + job.roots[i] * job.roots[j] * job.a.data[i * (i + 1) / 2 + j];
    if (!isfinite(l[at])) finite = false;
  }
  __syncthreads();
  return finite;
}

// a = l l' in place. In all threads: 0, or which leading minor is not positive.
__device__ int Decompose(int n, double* l) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int j = 0; j < n; ++j) {
    const double pivot = l[j * n + j];
    if (!(pivot > 0)) return j + 1;
    const double root = sqrt(pivot);
    __syncthreads();  // all have read the pivot
    for (int i = j + thread; i < n; i += kThreads) l[i * n + j] = i == j ? root : l[i * n + j] / root;
    __syncthreads();
    for (int i = j + 1 + thread / kAcross; i < n; i += kThreads / kAcross) {
      for (int k = j + 1 + thread % kAcross; k <= i; k += kAcross) l[i * n + k] -= l[i * n + j] * l[k * n + j];
    }
    __syncthreads();
  }
  return 0;
}

// inverse = l^-1, a thread a column.
__device__ void InvertTriangle(int n, const double* l, double* inverse) {
  for (int column = static_cast<int>(threadIdx.x); column < n; column += kThreads) {
    for (int i = column; i < n; ++i) {
      double sum = i == column ? 1.0 : 0.0;
      for (int k = column; k < i; ++k) sum -= l[i * n + k] * inverse[k * n + column];
      inverse[i * n + column] = sum / l[i * n + i];
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) SpdInversesKernel(const SpdInverseJob* jobs, int* infos) {
  const SpdInverseJob job = jobs[blockIdx.x];
  const int n = static_cast<int>(job.x.rows), thread = static_cast<int>(threadIdx.x);
  double *const l = job.work, *const inverse = l + n * n;
  const int info = Widen(job, l) ? Decompose(n, l) : -1;
  if (thread == 0) infos[blockIdx.x] = info;
  if (info != 0) return;
  InvertTriangle(n, l, inverse);
  for (int at = thread; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n;
    if (j > i) continue;
    double sum = 0;
    for (int k = i; k < n; ++k) sum += inverse[k * n + i] * inverse[k * n + j];
    if (job.roots != nullptr) sum *= job.roots[i] * job.roots[j];
    job.x.at(i, j) = job.x.at(j, i) = static_cast<float>(sum);
    if (job.packed != nullptr) job.packed[i * (i + 1) / 2 + j] = static_cast<float>(sum);
  }
}

}  // namespace

cudaError_t SpdInverses(cudaStream_t stream, const SpdInverseJob* jobs, int count, int* infos) {
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), SpdInversesKernel, jobs, infos);
}

}  // namespace precondor::cuda
