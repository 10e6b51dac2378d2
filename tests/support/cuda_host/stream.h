// SPDX-License-Identifier: Apache-2.0
// Streams that run later, and the errors that a device may have.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <functional>
#include <set>
#include <tuple>
#include <utility>

#include "tests/support/cuda_host/devices.h"
#include "tests/support/cuda_host/grid.h"
#include "tests/support/cuda_host/memory.h"

namespace precondor::cuda_host {

// Puts work behind what is on the stream. It runs when a thread waits for it, unless the device is lost by then.
void Enqueue(cudaStream_t stream, std::function<void()> work);

// That a stream belongs to.
int DeviceOf(cudaStream_t stream);

// Counts a call of the CUDA runtime, and is its result: cudaSuccess, or what FailCall asked for.
cudaError_t CountCall();

// --- for tests -------------------------------------------------------------------------------------------------
int64_t Calls();
// Times that a thread has waited for a stream or an event whose work had not run, or has asked for it too early. With
// $CUDA_HOST_WAITS the count is in that file, of 8 bytes.
int64_t Waits();
// Copies from the host to a device.
int64_t Uploads();
// The call after `calls` more returns `error` and does nothing else; so do all later ones if the error is one that
// ends a device's use, until Recover. A call of cuBLAS or cuSOLVER that fails so returns a status of the library, which
// does not tell the error; cudaGetLastError does.
void FailCall(int64_t calls, cudaError_t error);
void Recover();
// Before the call after `calls` more `what` runs, on its thread: what another thread may do at that moment.
void RunBefore(int64_t calls, std::function<void()> what);
// Sets the number of devices; -1: no driver. Not while memory is held.
void SetDeviceCount(int count);
// Memory, streams, events, pools and handles that have been made and not yet freed.
int64_t LiveObjects();
void AddLiveObjects(int64_t count);

// Dynamic shared memory that a kernel may have: 48 KiB, or what cudaFuncSetAttribute has allowed it.
size_t AllowedSharedBytes(const void* kernel);
// The most that cudaFuncSetAttribute allows, and cudaDevAttrMaxSharedMemoryPerBlockOptin says; 227 KiB at first.
void SetMostSharedBytes(int bytes);
// The first number of the devices' compute capability; 9 at first.
void SetComputeCapability(int major);

template <typename... Params, typename... Args>
cudaError_t LaunchKernel(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  const cudaError_t error = CountCall();
  if (error != cudaSuccess) return error;
  if (DeviceOf(config->stream) != CurrentDevice()) return cudaErrorInvalidResourceHandle;
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
      block.x * block.y * block.z == 0 || block.x * block.y * block.z > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  const size_t shared_bytes = config->dynamicSmemBytes;
  if (shared_bytes > AllowedSharedBytes(reinterpret_cast<const void*>(kernel))) return cudaErrorInvalidValue;
  if (!LoadModule(CurrentDevice(), reinterpret_cast<const void*>(kernel), kKernelModuleBytes)) {
    return cudaErrorMemoryAllocation;
  }
  Enqueue(config->stream,
          [grid, block, shared_bytes, kernel, params = std::tuple<Params...>(std::forward<Args>(args)...)] {
            RunGrid(grid, block, shared_bytes, [&] { std::apply(kernel, params); });
          });
  return cudaSuccess;
}

}  // namespace precondor::cuda_host
