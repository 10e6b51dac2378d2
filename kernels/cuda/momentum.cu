// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/matrix_parts.h"
#include "kernels/cuda/momentum.h"

namespace precondor::cuda {
namespace {

// values = alpha d + beta values; elements that do not exist are zeros and stay so.
__device__ void AddTo(Vec4<float> (&values)[kHeldOfPart], float alpha, const Vec4<float> (&d)[kHeldOfPart],
                      float beta) {
#pragma unroll
  for (int i = 0; i < kHeldOfPart; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) values[i].at[c] = fmaf(beta, values[i].at[c], alpha * d[i].at[c]);
  }
}

__device__ double SquareOf(const Vec4<float> (&values)[kHeldOfPart]) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHeldOfPart; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) sum += double{values[i].at[c]} * values[i].at[c];
  }
  return sum;
}

__global__ void __launch_bounds__(kThreadsOfPart) MomentumKernel(ManyJobs<MomentumJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const MomentumJob job = jobs.Of(block);
    const MatrixPart part(job.d.cols, block - job.first);
    Vec4<float> d[kHeldOfPart], values[kHeldOfPart];
    LoadVec4s(part.Of(job.d), d);
    double sums[2] = {};
    if (job.momentum.data != nullptr) {
      LoadVec4s(part.Of(job.momentum), values);
      AddTo(values, job.alpha, d, job.beta);
      StoreVec4s(values, part.Of(job.next));
      if (job.lookahead.data != nullptr) {
        AddTo(values, 1.0f, d, job.beta);
        StoreVec4s(values, part.Of(job.lookahead));
      }
      sums[1] = SquareOf(values);
    }
    sums[0] = SquareOf(d);
    if (job.momentum.data == nullptr) sums[1] = sums[0];
    AddParts(sums, block - job.first, PartsOf(job.d.rows, job.d.cols), job.squares.partials, job.squares.arrived,
             job.squares.totals);
  }
}

}  // namespace

cudaError_t AddMomentum(cudaStream_t stream, const MomentumJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreadsOfPart, MomentumKernel, ManyJobs<MomentumJob>{jobs, count});
}

}  // namespace precondor::cuda
