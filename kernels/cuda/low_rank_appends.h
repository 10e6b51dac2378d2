// SPDX-License-Identifier: Apache-2.0
// Writes new rows into low-rank factors and updates their Gram matrices. One launch handles many factors, and reads
// each old row once for up to kAppendedTogether new ones.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

constexpr int64_t kAppendedTogether = 4;

// One append, as Backend::LowRankAppend defines it. Products are summed in f64. Pointers are to device memory.
struct LowRankAppendJob {
  ConstMatrixView rows;            // [k, d]
  const double* scales = nullptr;  // [k]
  const int64_t* slots = nullptr;  // [k], ascending
  MatrixView vectors;              // [n, d]
  float* gram = nullptr;           // [n (n + 1) / 2]
  int64_t first = 0;               // blocks of all jobs before this one
};
constexpr int64_t LowRankAppendBlocks(const LowRankAppendJob& job) {
  return job.vectors.rows * ((job.rows.rows + kAppendedTogether - 1) / kAppendedTogether);
}
// Runs `jobs` [count], in device memory, of `blocks` blocks in all.
cudaError_t LowRankAppends(cudaStream_t stream, const LowRankAppendJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda
