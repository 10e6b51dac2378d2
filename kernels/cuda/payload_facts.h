// SPDX-License-Identifier: Apache-2.0
// Digest and finiteness of a matrix in one pass (kernels/device_plane.h).
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Sums modulo 2^64, so that their order does not matter.
struct PayloadSums {
  uint64_t digest = 0;
  uint64_t not_finite = 0;  // elements
};

inline constexpr int64_t kMaxPayloadPieces = 1024;
// Blocks that SumPayload runs of x, and elements of `sums`.
int64_t PayloadPieces(ConstMatrixView x);
// sums[i] of every piece of x, in device memory; the whole's are their sum. One launch; its error.
cudaError_t SumPayload(cudaStream_t stream, ConstMatrixView x, PayloadSums* sums);

}  // namespace precondor::cuda
