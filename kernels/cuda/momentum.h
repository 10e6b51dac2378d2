// SPDX-License-Identifier: Apache-2.0
// Adds gradients of many layers to their momentum in one launch, and computes norms in the same pass.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"
#include "kernels/cuda/rounding.h"

namespace precondor::cuda {

// next = alpha d + beta momentum; direction = d + beta next, or `next` if `lookahead` has no elements; `lookahead`
// receives the direction. If `momentum` has no elements, the direction is d, and nothing is written. `next` may be
// `momentum`.
struct MomentumJob {
  float alpha = 1;
  ConstMatrixView d;
  ConstMatrixView momentum;
  float beta = 0;
  MatrixView next;
  MatrixView lookahead = {};
  SumOfParts squares = {};  // receive |d|^2 and |direction|^2
  int64_t first = 0;        // blocks of all jobs before this one
};
// Runs `jobs` [count], in device memory, of `blocks` blocks in all; a job has ScaledCopyBlocks of its shape.
cudaError_t AddMomentum(cudaStream_t stream, const MomentumJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda
