// SPDX-License-Identifier: Apache-2.0
// CUDA on the host: the sources of kernels/cuda compiled as C++ and run on the CPU, so that their logic is tested where
// there is no GPU. This header is included before all else in such a build (-include); it gives the language's words.
//
// It keeps this of a device: threads of a block run apart from one barrier to the next, in changing orders; a barrier
// or shuffle that not all threads reach ends the test; shared memory holds what the last block left there; what is put
// on a stream runs later, when a thread waits for it; memory comes filled with NaN. What it does not show: speed,
// races within a warp's step, what nvcc makes of the text, cuBLAS' and cuSOLVER's own rounding (OpenBLAS answers here).
#pragma once

#define PRECONDOR_CUDA_ON_HOST

#include <cuda_runtime.h>
#include <math.h>

#include "tests/support/cuda_host/grid.h"
#include "tests/support/cuda_host/stream.h"

// The language's names: NOLINTBEGIN(bugprone-reserved-identifier)
#undef __shared__
#undef __launch_bounds__
#define __shared__ static  // one grid runs at a time
#define __launch_bounds__(...)
#define __syncthreads() ::precondor::cuda_host::WaitForBlock(__FILE__, __LINE__)
#define __syncwarp() ::precondor::cuda_host::WaitForWarp(__FILE__, __LINE__)
#define __shfl_down_sync(mask, value, offset) \
  ::precondor::cuda_host::ShuffleDown(mask, value, static_cast<unsigned>(offset), __FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, offset) \
  ::precondor::cuda_host::ShuffleXor(mask, value, static_cast<unsigned>(offset), __FILE__, __LINE__)
#define __ballot_sync(mask, here) ::precondor::cuda_host::Ballot(mask, here, __FILE__, __LINE__)
#define __popc(bits) __builtin_popcount(bits)
// NOLINTEND(bugprone-reserved-identifier)

// Blocks run one after the other here, so that what one has written is there for the next.
// NOLINTBEGIN(bugprone-reserved-identifier)
inline void __threadfence() {}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
// NOLINTEND(bugprone-reserved-identifier)
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}
#define cudaLaunchKernelEx ::precondor::cuda_host::LaunchKernel
