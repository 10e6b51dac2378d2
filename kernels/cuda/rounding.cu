// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matrix_parts.h"
#include "kernels/cuda/rounding.h"

namespace precondor::cuda {
namespace {

__device__ double Wide(float x) { return x; }
__device__ double Wide(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void Set(float& to, double value) { to = static_cast<float>(value); }
__device__ void Set(__nv_bfloat16& to, double value) { to = __float2bfloat16_rn(static_cast<float>(value)); }

template <typename From, typename To>
__device__ double FactorOf(const ScaledCopyJob<From, To>& job) {
  if (job.norm == nullptr) return job.factor;
  return *job.norm == 0 ? 0 : job.factor / (sqrt(*job.norm) + job.epsilon);
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreadsOfPart)
    ScaledCopyKernel(ManyJobs<ScaledCopyJob<From, To>> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const ScaledCopyJob<From, To> job = jobs.Of(block);
    const MatrixPart part(job.to.cols, block - job.first);
    Vec4<From> values[kHeldOfPart];
    LoadVec4s(part.Of(job.from), values);
    const double factor = FactorOf(job);
    const Vec4Position at = MatrixPart::OfThread();
    const int64_t below = part.row + at.row - (part.column + at.column);  // of the thread's first element
    Vec4<To> copies[kHeldOfPart];
    double sums[1] = {};
#pragma unroll
    for (int i = 0; i < kHeldOfPart; ++i) {
#pragma unroll
      for (int c = 0; c < kFour; ++c) {
        double value = factor * Wide(values[i].at[c]);
        if (below + i * at.step == c) value += job.shift;
        Set(copies[i].at[c], value);
        sums[0] += value * value;
      }
    }
    StoreVec4s(copies, part.Of(job.to));
    if (job.square.totals == nullptr) continue;
    AddParts(sums, block - job.first, PartsOf(job.to.rows, job.to.cols), job.square.partials, job.square.arrived,
             job.square.totals);
  }
}

}  // namespace

int64_t ScaledCopyBlocks(int64_t rows, int64_t cols) { return PartsOf(rows, cols); }

template <typename From, typename To>
cudaError_t ScaledCopies(cudaStream_t stream, const ScaledCopyJob<From, To>* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreadsOfPart, ScaledCopyKernel<From, To>,
                    ManyJobs<ScaledCopyJob<From, To>>{jobs, count});
}
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<float, float>*, int, int64_t);
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<float, __nv_bfloat16>*, int, int64_t);
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<__nv_bfloat16, __nv_bfloat16>*, int, int64_t);
template cudaError_t ScaledCopies(cudaStream_t, const ScaledCopyJob<__nv_bfloat16, float>*, int, int64_t);

}  // namespace precondor::cuda
