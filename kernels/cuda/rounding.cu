// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rounding.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
// The part of a matrix that a block handles.
constexpr int kRowsOfPart = 32;
constexpr int kColumnsOfPart = 128;
constexpr int kHeld = kRowsOfPart / static_cast<int>(kThreads / kWarp);  // number of rows of a thread
static_assert(kColumnsOfPart == kWarp * kFour);

__host__ __device__ constexpr int64_t Parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

// The first element of a part. A warp handles every eighth row of the part, and a thread four neighbouring columns of
// each.
struct Corner {
  int64_t row, column;
};
__device__ Corner CornerOf(ConstMatrixView shape, int64_t part) {
  const int64_t across = Parts(shape.cols, kColumnsOfPart);
  return {part / across * kRowsOfPart, part % across * kColumnsOfPart};
}
__device__ Vec4Position PlaceInPart() {
  return {static_cast<int>(threadIdx.x / kWarp), kThreads / kWarp, static_cast<int>(threadIdx.x % kWarp) * kFour};
}

template <typename T>
__device__ Vec4s<T> Vec4sAt(T* data, int64_t stride, ConstMatrixView shape, Corner corner) {
  const BasicMatrixView<T> whole(data, shape.rows, shape.cols, stride);
  return Vec4sOf<kRowsOfPart, kColumnsOfPart>(whole, corner.row, corner.column, PlaceInPart());
}

// Returns the sum of the squares of all threads' elements, in thread 0.
__device__ double SquareOf(const Vec4<float> (&fours)[kHeld]) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int c = 0; c < kFour; ++c) sum += double{fours[i].at[c]} * fours[i].at[c];
  }
  return CombineBlock<kThreads>(sum, Add());
}

// Returns the sum of `count` numbers that other blocks have written, in thread 0.
__device__ double Total(const double* partials, int64_t count) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += __ldcg(partials + i);
  return CombineBlock<kThreads>(sum, Add());
}

__global__ void __launch_bounds__(kThreads) RoundKernel(ManyJobs<RoundingJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const RoundingJob job = jobs.Of(block);
    const int64_t part = block - job.first;
    const Corner corner = CornerOf(job.from, part);
    Vec4<float> values[kHeld];
    LoadVec4s(Vec4sAt(job.from.data, job.from.stride, job.from, corner), values);
    Vec4<__nv_bfloat16> rounded[kHeld];
    for (int i = 0; i < kHeld; ++i) {
      for (int c = 0; c < kFour; ++c) rounded[i].at[c] = __float2bfloat16_rn(values[i].at[c]);
    }
    StoreVec4s(rounded, Vec4sAt(job.rounded, job.stride, job.from, corner));
    if (job.squares == nullptr) continue;
    const double sum = SquareOf(values);
    if (threadIdx.x == 0) job.partials[part] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) WidenKernel(ManyJobs<RoundingJob> jobs, int64_t blocks) {
  for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const RoundingJob job = jobs.Of(block);
    const int64_t part = block - job.first;
    const Corner corner = CornerOf(job.from, part);
    Vec4<__nv_bfloat16> rounded[kHeld];
    LoadVec4s(Vec4sAt(job.answer, job.stride, job.from, corner), rounded);
    Vec4<float> values[kHeld];
    for (int i = 0; i < kHeld; ++i) {
      for (int c = 0; c < kFour; ++c) values[i].at[c] = __bfloat162float(rounded[i].at[c]);
    }
    StoreVec4s(values, Vec4sAt(job.to.data, job.to.stride, job.from, corner));
    if (job.squares == nullptr) continue;
    const double sum = SquareOf(values);
    const int64_t parts = Parts(job.from.rows, kRowsOfPart) * Parts(job.from.cols, kColumnsOfPart);
    if (threadIdx.x == 0) job.partials[parts + part] = sum;
    if (!IsLastBlockByFirstThread(job.arrived, static_cast<unsigned>(parts))) continue;
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
