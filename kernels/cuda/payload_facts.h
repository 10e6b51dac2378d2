// SPDX-License-Identifier: Apache-2.0
// Computes the digest and the finiteness of a matrix in one pass (PayloadFacts in kernels/region_memory.h).
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Sums over a piece of a matrix, modulo 2^64, so that the order of addition does not matter.
struct PayloadSums {
  uint64_t digest = 0;
  uint64_t not_finite = 0;  // number of elements that are not finite
};

inline constexpr int64_t kMaxPayloadPieces = 1024;
// Returns the number of pieces of x, at most kMaxPayloadPieces. SumPayload runs a block for each.
int64_t PayloadPieces(ConstMatrixView x);
// Sets sums[i], in device memory, to the sums of piece i of x; their total is for all of x. Returns the error of its
// one launch.
cudaError_t SumPayload(cudaStream_t stream, ConstMatrixView x, PayloadSums* sums);

}  // namespace precondor::cuda
