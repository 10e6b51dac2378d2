// SPDX-License-Identifier: Apache-2.0
// How kernels are launched: always on a named stream, with the grid's limits respected. For .cu files alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>
#include <utility>

namespace precondor::cuda {

constexpr unsigned kWarp = 32;
// Grids beyond this many blocks gain nothing; kernels take what is left in strides of the grid.
constexpr int64_t kMaxBlocks = 1 << 16;

constexpr int64_t Blocks(int64_t items, int64_t items_per_block) {
  return std::clamp<int64_t>((items + items_per_block - 1) / items_per_block, 1, kMaxBlocks);
}

// The launch's own error; what the kernel does wrong shows at a later call on the stream.
template <typename... Params, typename... Args>
cudaError_t Launch(cudaStream_t stream, dim3 grid, dim3 block, void (*kernel)(Params...), Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace precondor::cuda
