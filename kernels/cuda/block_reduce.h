// SPDX-License-Identifier: Apache-2.0
// Reductions over the threads of a block, and over blocks that finish in any order. Every run gives the same bits.
// Include it in .cu files only.
#pragma once

#include "kernels/cuda/launch.h"

namespace precondor::cuda {

// Combines the values of all threads of a block in a fixed order and returns the result in thread 0; the return value
// of other threads is unspecified. All kThreads threads of the block must call it.
template <unsigned kThreads, typename Combine>
__device__ double CombineBlock(double value, Combine combine) {
  __shared__ double of_warp[kThreads / kWarp];
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_down_sync(0xffffffffu, value, offset));
  }
  __syncthreads();  // waits for threads that still read of_warp in an earlier call
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

// Returns true in the last of `blocks` blocks that call it. That block sees everything that thread 0 of each other
// block wrote before its call; the call does not wait for the stores of other threads. All threads of each block must
// call it. Two calls share `last`, so a barrier must lie between them (CombineBlock has one). Precondition: *arrived is
// 0 before the first call.
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
