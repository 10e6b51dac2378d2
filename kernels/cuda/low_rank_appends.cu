// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/low_rank_appends.h"

namespace precondor::cuda {
namespace {

constexpr unsigned kThreads = 256;

// Returns the index of the new row that belongs at row `slot` of the vectors, or -1 if there is none.
__device__ int64_t NewRowAt(const LowRankAppendJob& job, int64_t slot) {
  int64_t low = 0, high = job.rows.rows;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (job.slots[middle] < slot) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < job.rows.rows && job.slots[low] == slot ? low : -1;
}

// A block handles one row of the updated vectors and up to kAppendedTogether new rows. It computes the new rows from
// their source, because the block that stores them may not have run yet.
template <typename Jobs>
__global__ void __launch_bounds__(kThreads, 3) LowRankAppendKernel(Jobs jobs, int64_t blocks) {
  const Share share = ShareOf(blocks);
  for (unsigned block = share.begin; block < share.end; ++block) {
    const LowRankAppendJob& job = jobs.InShared(share, block);
    const int64_t n = job.vectors.rows, row = (block - job.first) % n, d = job.vectors.cols;
    const int64_t begin = (block - job.first) / n * kAppendedTogether;
    const int64_t left = job.rows.rows - begin, count = left < kAppendedTogether ? left : kAppendedTogether;
    const int64_t new_row = NewRowAt(job, row);
    const float* const old = job.vectors.row(row);
    const float* const source = new_row < 0 ? old : job.rows.row(new_row);
    const float scale = new_row < 0 ? 1.0f : static_cast<float>(job.scales[new_row]);
    float scales[kAppendedTogether];
    double sums[kAppendedTogether] = {};
    for (int64_t i = 0; i < kAppendedTogether; ++i) {
      scales[i] = i < count ? static_cast<float>(job.scales[begin + i]) : 0.0f;
    }
    const bool aligned = MovesByFours(job.rows.data, job.rows.stride, kFour) &&
                         MovesByFours(job.vectors.data, job.vectors.stride, kFour);
    constexpr int kStep = kThreads * kFour;
    for (int64_t j = int64_t{threadIdx.x} * kFour; j < d; j += kStep) {
      Vec4<float> x[1], news[kAppendedTogether][1] = {};
      LoadFoursOfRow(source, d, j, kStep, aligned, x);
#pragma unroll
      for (int i = 0; i < kAppendedTogether; ++i) {
        if (i < count) LoadFoursOfRow(job.rows.row(begin + i), d, j, kStep, aligned, news[i]);
      }
#pragma unroll
      for (int c = 0; c < kFour; ++c) {
        x[0].at[c] *= scale;
#pragma unroll
        for (int i = 0; i < kAppendedTogether; ++i) {
          if (i < count) sums[i] += double{x[0].at[c]} * (scales[i] * news[i][0].at[c]);
        }
      }
      if (new_row < 0 || begin != 0) continue;
      float* const to = Global(job.vectors.row(row)) + j;
      for (int c = 0; c < kFour; ++c) {
        if (j + c < d) to[c] = x[0].at[c];
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const double sum = CombineBlock<kThreads>(sums[i], Add());
      const int64_t slot = job.slots[begin + i];
      // The product of two new rows is written by the block of the upper row.
      if (threadIdx.x != 0 || (new_row >= 0 && row > slot)) continue;
      const int64_t lower = std::max(row, slot), column = std::min(row, slot);
      job.gram[lower * (lower + 1) / 2 + column] = static_cast<float>(sum);
    }
  }
}

}  // namespace

cudaError_t LowRankAppends(cudaStream_t stream, const LowRankAppendJob* jobs, int count, int64_t blocks) {
  return LaunchJobs(stream, blocks, kThreads, LowRankAppendKernel<ManyJobs<LowRankAppendJob>>,
                    ManyJobs<LowRankAppendJob>{jobs, count});
}

}  // namespace precondor::cuda
