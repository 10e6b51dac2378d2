// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rounding.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
// A block's part of a matrix.
constexpr int64_t kRowsOfPart = 32;
constexpr int64_t kColumnsOfPart = 128;

__host__ __device__ constexpr int64_t Parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

// The sum of f(i, j)^2 over the part, in thread 0.
template <typename Function>
__device__ double ForEachOfPart(ConstMatrixView shape, int64_t part, Function f) {
  const int64_t across = Parts(shape.cols, kColumnsOfPart);
  const int64_t row = part / across * kRowsOfPart, column = part % across * kColumnsOfPart;
  const int64_t last_row = shape.rows < row + kRowsOfPart ? shape.rows : row + kRowsOfPart;
  const int64_t last_column = shape.cols < column + kColumnsOfPart ? shape.cols : column + kColumnsOfPart;
  double sum = 0;
  for (int64_t i = row + threadIdx.x / kWarp; i < last_row; i += kThreads / kWarp) {
    for (int64_t j = column + threadIdx.x % kWarp; j < last_column; j += kWarp) {
      const double value = f(i, j);
      sum += value * value;
    }
  }
  return CombineBlock<kThreads>(sum, Add());
}

// The sum of `count` numbers that other blocks have written, in thread 0.
__device__ double Total(const double* partials, int64_t count) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += __ldcg(partials + i);
  return CombineBlock<kThreads>(sum, Add());
}

__global__ void __launch_bounds__(kThreads) RoundKernel(ManyJobs<RoundingJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const RoundingJob job = jobs.Of(block);
    const int64_t part = block - job.first;
    const double sum = ForEachOfPart(job.from, part, [&](int64_t i, int64_t j) {
      const float value = job.from.at(i, j);
      job.rounded[i * job.stride + j] = __float2bfloat16_rn(value);
      return double{value};
    });
    if (job.squares != nullptr && threadIdx.x == 0) job.partials[part] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) WidenKernel(ManyJobs<RoundingJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const RoundingJob job = jobs.Of(block);
    const int64_t part = block - job.first;
    const double sum = ForEachOfPart(job.from, part, [&](int64_t i, int64_t j) {
      const float value = __bfloat162float(job.answer[i * job.stride + j]);
      job.to.at(i, j) = value;
      return double{value};
    });
    if (job.squares == nullptr) continue;
    const int64_t parts = Parts(job.from.rows, kRowsOfPart) * Parts(job.from.cols, kColumnsOfPart);
    if (threadIdx.x == 0) job.partials[parts + part] = sum;
    if (!IsLastBlock(job.arrived, static_cast<unsigned>(parts))) continue;
    for (int which = 0; which < 2; ++which) {
      const double square = Total(job.partials + which * parts, parts);
      if (threadIdx.x == 0) job.squares[which] = square;
    }
  }
}

}  // namespace

int64_t RoundingBlocks(ConstMatrixView from) {
  return Parts(from.rows, kRowsOfPart) * Parts(from.cols, kColumnsOfPart);
}

cudaError_t RoundToBf16(cudaStream_t stream, const RoundingJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, RoundKernel, ManyJobs<RoundingJob>{jobs, count});
}

cudaError_t WidenFromBf16(cudaStream_t stream, const RoundingJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, WidenKernel, ManyJobs<RoundingJob>{jobs, count});
}

}  // namespace precondor::cuda
