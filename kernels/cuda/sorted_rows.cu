// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sorted_rows.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int kStep = kWarp * kFour;
constexpr int kFours = 4;  // that a thread loads of a row before it waits for the first

// Calls run(job, row) in a warp for each row of all jobs.
template <typename Run>
__device__ __forceinline__ void ForEachRow(const SortedRowsJob* jobs, int count, int64_t rows, Run run) {
  constexpr int64_t kRows = kThreads / kWarp;
  for (int64_t row = blockIdx.x * kRows + threadIdx.x / kWarp; row < rows; row += gridDim.x * kRows) {
    const SortedRowsJob job = JobOf(jobs, count, row);
    run(job, row - job.first);
  }
}

// Returns the sum over a warp in all its lanes.
template <typename T>
__device__ T SumOfWarp(T sum) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

__global__ void __launch_bounds__(kThreads) RowEstimatesKernel(const SortedRowsJob* jobs, int count, int64_t rows) {
  const unsigned lane = threadIdx.x % kWarp;
  ForEachRow(jobs, count, rows, [&](const SortedRowsJob& job, int64_t row) {
    const bool q_aligned = MovesByFours(job.q.data, job.q.stride, kFour);
    const bool p_aligned = MovesByFours(job.p.data, job.p.stride, kFour);
    double estimate = 0, square = 0;
    for (int64_t j = lane * kFour; j < job.p.cols; j += kStep * kFours) {
      Vec4<float> q[kFours], p[kFours];
      LoadFoursOfRow(job.q.row(row), job.p.cols, j, kStep, q_aligned, q);
      LoadFoursOfRow(job.p.row(row), job.p.cols, j, kStep, p_aligned, p);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
#pragma unroll
        for (int c = 0; c < kFour; ++c) {
          estimate += double{q[i].at[c]} * p[i].at[c];
          square += double{p[i].at[c]} * p[i].at[c];
        }
      }
    }
    estimate = SumOfWarp(estimate);
    square = SumOfWarp(square);
    if (lane != 0) return;
    job.estimates[row] = estimate;
    job.squares[row] = square;
  });
}

// Returns, in all lanes, the number of rows that come before `row`, or -1 if an estimate is not finite.
__device__ __forceinline__ int RankOf(const SortedRowsJob& job, int64_t row) {
  constexpr int kTogether = 8;
  const double own = job.estimates[row];
  int before = 0, not_finite = 0;
  for (int64_t begin = threadIdx.x % kWarp; begin < job.p.rows; begin += kTogether * kWarp) {
    double others[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t other = begin + i * int64_t{kWarp};
      others[i] = other < job.p.rows ? job.estimates[other] : own;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      before += others[i] > own || (others[i] == own && begin + i * int64_t{kWarp} < row) ? 1 : 0;
      not_finite += others[i] - others[i] == 0 ? 0 : 1;
    }
  }
  before = SumOfWarp(before);
  return SumOfWarp(not_finite) == 0 ? before : -1;
}

__global__ void __launch_bounds__(kThreads) SortRowsKernel(const SortedRowsJob* jobs, int count, int64_t rows) {
  const unsigned lane = threadIdx.x % kWarp;
  ForEachRow(jobs, count, rows, [&](const SortedRowsJob& job, int64_t row) {
    const int rank = RankOf(job, row);
    const int64_t place = rank < 0 ? row : rank;
    if (lane == 0) job.order[place] = static_cast<int>(row);
    const bool p_aligned = MovesByFours(job.p.data, job.p.stride, kFour);
    const double length = rank < 0 ? nan("") : sqrt(job.squares[row]);
    float* const sorted = job.sorted.row(place);
    for (int64_t j = lane * kFour; j < job.p.cols; j += kStep * kFours) {
      Vec4<float> p[kFours];
      LoadFoursOfRow(job.p.row(row), job.p.cols, j, kStep, p_aligned, p);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
#pragma unroll
        for (int c = 0; c < kFour; ++c) {
          const int64_t column = j + i * kStep + c;
          if (column < job.p.cols) sorted[column] = static_cast<float>(p[i].at[c] / length);
        }
      }
    }
  });
}

dim3 GridOf(int64_t rows) { return dim3(static_cast<unsigned>(Blocks(rows, kThreads / kWarp))); }

}  // namespace

cudaError_t RowEstimates(cudaStream_t stream, const SortedRowsJob* jobs, int count, int64_t rows) {
  return Launch(stream, GridOf(rows), dim3(kThreads), RowEstimatesKernel, jobs, count, rows);
}

cudaError_t SortRows(cudaStream_t stream, const SortedRowsJob* jobs, int count, int64_t rows) {
  return Launch(stream, GridOf(rows), dim3(kThreads), SortRowsKernel, jobs, count, rows);
}

}  // namespace precondor::cuda
