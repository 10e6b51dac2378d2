// SPDX-License-Identifier: Apache-2.0
// Between f32 matrices and bf16 ones, of many callers in one launch, and the lengths of what comes by. Sums go in parts
// whose number and order depend on the shape alone.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Pointers are to device memory; the matrices in bf16 have rows of `stride` elements.
struct RoundingJob {
  ConstMatrixView from = {};  // RoundToBf16: `rounded` becomes it
  __nv_bfloat16* rounded = nullptr;
  int64_t stride = 0;
  MatrixView to = {};  // WidenFromBf16: becomes `answer`; the shape of `from`
  const __nv_bfloat16* answer = nullptr;
  // Unless null, becomes |from|^2 and |to|^2 in WidenFromBf16: memory for 2 numbers of each block, and a 0.
  double* squares = nullptr;
  double* partials = nullptr;
  unsigned* arrived = nullptr;
  int64_t first = 0;  // blocks of all jobs before this one
};
int64_t RoundingBlocks(ConstMatrixView from);

// `jobs` [count], of `blocks` blocks in all, in device memory.
cudaError_t RoundToBf16(cudaStream_t stream, const RoundingJob* jobs, int count, int64_t blocks);
// After RoundToBf16 of the same jobs.
cudaError_t WidenFromBf16(cudaStream_t stream, const RoundingJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda
