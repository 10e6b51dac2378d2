// SPDX-License-Identifier: Apache-2.0
// Computes the digests and the finiteness of many matrices in one pass (PayloadFacts in kernels/device_plane.h).
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/base/matrix_view.h"

namespace precondor::cuda {

// Sums over a matrix, modulo 2^64, so that the order of addition does not matter.
struct PayloadSums {
  uint64_t digest = 0;
  uint64_t not_finite = 0;  // number of elements that are not finite
};

struct PayloadJob {
  ConstMatrixView x;
  PayloadSums* sums = nullptr;  // in device memory; receives the sums of x in addition to what it holds
  int64_t first = 0;            // number of blocks of the jobs before this one
};

// Returns the number of blocks of x.
int64_t PayloadBlocks(ConstMatrixView x);
// Adds up `count` jobs, which lie in device memory and have `blocks` blocks in all. Returns the error of its one
// launch.
cudaError_t SumPayloads(cudaStream_t stream, const PayloadJob* jobs, int count, int64_t blocks);

}  // namespace precondor::cuda
