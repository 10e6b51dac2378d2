// SPDX-License-Identifier: Apache-2.0
// Converts matrices of many callers between f32 and bf16 in one launch, and computes their squared lengths in the same
// pass. Sums are made in parts whose number and order depend on the shape alone.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// A matrix to round, and one to widen. Pointers are to device memory. The bf16 matrices have rows of `stride` elements.
struct RoundingJob {
  ConstMatrixView from = {};  // RoundToBf16 sets `rounded` from it
  __nv_bfloat16* rounded = nullptr;
  int64_t stride = 0;
  MatrixView to = {};  // WidenFromBf16 sets it from `answer`; has the shape of `from`
  const __nv_bfloat16* answer = nullptr;
  // If not null, WidenFromBf16 sets it to |from|^2 and |to|^2. Then `partials` has memory for 2 numbers of each block,
  // and `arrived` is a counter that is 0 before the launch.
  double* squares = nullptr;
  double* partials = nullptr;
  unsigned* arrived = nullptr;
  int64_t first = 0;  // blocks of all jobs before this one
};
// Returns the number of blocks of a job.
int64_t RoundingBlocks(ConstMatrixView from);

// Runs `jobs` [count], in device memory, of `blocks` blocks in all.
cudaError_t RoundToBf16(cudaStream_t stream, const RoundingJob* jobs, int count, int64_t blocks);
// Precondition: RoundToBf16 has run these jobs.
cudaError_t WidenFromBf16(cudaStream_t stream, const RoundingJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda
