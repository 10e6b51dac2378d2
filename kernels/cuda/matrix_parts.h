// SPDX-License-Identifier: Apache-2.0
// Passes over matrices in parts of 32 x 128 elements, one for each block, and sums over them. The parts of a sum, and
// their order, depend on the matrix' shape alone. Include it in .cu files only.
#pragma once

#include "kernels/cuda/block_reduce.h"
#include "kernels/cuda/global_memory.h"
#include "kernels/cuda/launch.h"

namespace precondor::cuda {

constexpr unsigned kThreadsOfPart = 256;
constexpr int kRowsOfPart = 32;
constexpr int kColumnsOfPart = 128;
constexpr int kHeldOfPart = kRowsOfPart / static_cast<int>(kThreadsOfPart / kWarp);  // number of rows of a thread
static_assert(kColumnsOfPart == kWarp * kFour);

__host__ __device__ constexpr int64_t PartsAcross(int64_t cols) { return (cols + kColumnsOfPart - 1) / kColumnsOfPart; }
__host__ __device__ constexpr int64_t PartsOf(int64_t rows, int64_t cols) {
  return (rows + kRowsOfPart - 1) / kRowsOfPart * PartsAcross(cols);
}

// The part of a matrix that a block handles. A warp handles every eighth row of it, and a thread four neighbouring
// columns of each.
struct MatrixPart {
  int64_t row, column;

  __device__ MatrixPart(int64_t cols, int64_t part)
      : row(part / PartsAcross(cols) * kRowsOfPart), column(part % PartsAcross(cols) * kColumnsOfPart) {}
  __device__ static Vec4Position OfThread() {
    return {static_cast<int>(threadIdx.x / kWarp), kThreadsOfPart / kWarp,
            static_cast<int>(threadIdx.x % kWarp) * kFour};
  }
  template <typename T>
  __device__ Vec4s<T> Of(const BasicMatrixView<T>& x) const {
    return Vec4sOf<kRowsOfPart, kColumnsOfPart>(x, row, column, OfThread());
  }
};

// Returns the sum of `count` numbers that other blocks have written, in thread 0.
__device__ inline double TotalOfParts(const double* partials, int64_t count) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreadsOfPart) sum += __ldcg(partials + i);
  return CombineBlock<kThreadsOfPart>(sum, Add());
}

// Adds up kSums numbers of all threads of all blocks of a job: the last block sets totals[i] to the sum of all sums[i].
// `partials` [kSums, parts].
template <int kSums>
__device__ void AddParts(const double (&sums)[kSums], int64_t part, int64_t parts, double* partials, unsigned* arrived,
                         double* totals) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const double sum = CombineBlock<kThreadsOfPart>(sums[i], Add());
    if (threadIdx.x == 0) partials[i * parts + part] = sum;
  }
  if (!IsLastBlockByFirstThread(arrived, static_cast<unsigned>(parts))) return;
  for (int i = 0; i < kSums; ++i) {
    const double total = TotalOfParts(partials + i * parts, parts);
    if (threadIdx.x == 0) totals[i] = total;
  }
}

}  // namespace precondor::cuda
