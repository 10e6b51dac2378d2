// SPDX-License-Identifier: Apache-2.0
// Sums over the threads of a block, and over blocks that end in any order, to the same bits at every run. For .cu files
// alone.
#pragma once

#include "kernels/cuda/launch.h"

namespace precondor::cuda {

// Of all threads' values, in thread 0. All kThreads threads of the block take part.
template <unsigned kThreads, typename Combine>
__device__ double CombineBlock(double value, Combine combine) {
  __shared__ double of_warp[kThreads / kWarp];
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_down_sync(0xffffffffu, value, offset));
  }
  __syncthreads();  // threads that still read an earlier call's of_warp
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned warp = 1; warp < kThreads / kWarp; ++warp) value = combine(value, of_warp[warp]);
  }
  return value;
}

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// Whether this block is the last of `blocks` that come here, and then sees what the others have written before. All
// threads of each take part. *arrived is 0 before the first.
__device__ inline bool IsLastBlock(unsigned* arrived, unsigned blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1u) == blocks - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// The same where only thread 0 has written what others read; no other thread waits for its stores. A barrier has to
// lie between this call and the one before, as CombineBlock's.
__device__ inline bool IsLastBlockByFirstThread(unsigned* arrived, unsigned blocks) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1u) == blocks - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace precondor::cuda
