// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sherman_morrison.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kWarp;
constexpr int64_t kMostDots = kMostRowsOfTerms + kMostVectorsOfTerms;

// Returns x'y of n elements in the warp's first thread. All threads of the warp must call it.
__device__ double DotOfWarp(const float* x, const float* y, int64_t n) {
  constexpr int kTogether = 8;
  double sum = 0;
  for (int64_t begin = threadIdx.x % kWarp; begin < n; begin += kTogether * kWarp) {
    float of_x[kTogether], of_y[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t j = begin + u * int64_t{kWarp};
      of_x[u] = j < n ? Global(x)[j] : 0.0f;
      of_y[u] = j < n ? Global(y)[j] : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) sum += double{of_x[u]} * of_y[u];
  }
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
  return sum;
}

// Computes the term of one vector of a job. dots [p + vector] is scratch for the coefficients of the rows and of the
// earlier terms.
__device__ void TermOf(const ShermanMorrisonJob& job, int64_t vector, double* dots, bool& infinite) {
  __shared__ double root;
  const int64_t n = job.v.cols, p = job.rows.rows;
  const float* const v = job.v.row(vector);
  float* const u = job.terms.row(vector);
  for (int64_t i = threadIdx.x / kWarp; i < p + vector; i += kWarps) {
    const double dot = DotOfWarp(v, i < p ? job.rows.row(i) : job.terms.row(i - p), n);
    if (threadIdx.x % kWarp == 0) dots[i] = job.factor * dot * (i < p ? job.weights[i] : -1.0);
  }
  __syncthreads();
  double product = 0;
  for (int64_t j = threadIdx.x; j < n; j += kThreads) {
    const double scaled = job.factor * v[j];
    double sum = job.scale * job.factor * job.y.at(vector, j) + job.shift * scaled;
    const float *const rows = At(Global(job.rows.data), j), *const terms = At(Global(job.terms.data), j);
#pragma unroll 8
    for (int64_t i = 0; i < p; ++i) sum += dots[i] * rows[i * job.rows.stride];
#pragma unroll 8
    for (int64_t i = 0; i < vector; ++i) sum += dots[p + i] * terms[i * job.terms.stride];
    u[j] = static_cast<float>(sum);
    product += scaled * u[j];
  }
  product = CombineBlock<kThreads>(product, Add());
  if (threadIdx.x == 0) {
    root = 1.0 / sqrt(1.0 + (product > 0 ? product : 0.0));
    infinite = infinite || !isfinite(product);
  }
  __syncthreads();
  for (int64_t j = threadIdx.x; j < n; j += kThreads) u[j] = static_cast<float>(root * u[j]);
  __syncthreads();  // before other threads read the term, and before the next call overwrites dots and root
}

__global__ void __launch_bounds__(kThreads) ShermanMorrisonKernel(const ShermanMorrisonJob* jobs) {
  __shared__ double dots[kMostDots];
  const ShermanMorrisonJob& job = jobs[blockIdx.x];
  bool infinite = false;
  for (int64_t vector = 0; vector < job.v.rows; ++vector) TermOf(job, vector, dots, infinite);
  if (threadIdx.x == 0) *job.infinite = infinite ? 1.0 : 0.0;
  if (job.squares == nullptr) return;
  for (int64_t j = threadIdx.x; j < job.v.cols; j += kThreads) {
    double sum = 0;
    for (int64_t vector = 0; vector < job.v.rows; ++vector) {
      sum += double{job.terms.at(vector, j)} * job.terms.at(vector, j);
    }
    job.squares[j] = sum;
  }
}

}  // namespace

cudaError_t ShermanMorrisonTerms(cudaStream_t stream, const ShermanMorrisonJob* jobs, int count) {
  return Launch(stream, dim3(static_cast<unsigned>(count)), dim3(kThreads), ShermanMorrisonKernel, jobs);
}

}  // namespace precondor::cuda
