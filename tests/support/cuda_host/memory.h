// SPDX-License-Identifier: Apache-2.0
// How much memory each device has, and how much of it is taken: allocations, what pools keep, handles of libraries, and
// code that is loaded at its first launch. An allocation that does not fit fails as it does on a device.
#pragma once

#include <cstdint>
#include <memory>

namespace precondor::cuda_host {

// The bytes that the imitation takes from a device for them. A real device's figures differ; the order of magnitude is
// theirs.
constexpr int64_t kHandleBytes = int64_t{32} << 20;          // of cuBLAS or cuSOLVER, until it is destroyed
constexpr int64_t kLibraryModuleBytes = int64_t{192} << 20;  // of cuBLAS or cuSOLVER, at its first routine
constexpr int64_t kKernelModuleBytes = int64_t{1} << 20;     // of a kernel, at its first launch

// False where the device has less; then nothing is taken.
bool TakeMemory(int device, int64_t bytes);
void GiveMemory(int device, int64_t bytes);
int64_t FreeMemory(int device);
int64_t TotalMemory();

// Takes `bytes` for `module` the first time that a device needs it, and never gives them back. False: they do not fit.
bool LoadModule(int device, const void* module, int64_t bytes);

// A pool's part of its device's memory, in pieces of 2 MiB. Memory that was freed stays with the pool until Trim.
class PoolMemory {
 public:
  explicit PoolMemory(int device) : device_(device) {}
  ~PoolMemory();
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;
  bool Take(int64_t bytes);
  void Give(int64_t bytes);
  void Trim();

 private:
  const int device_;
  int64_t used_ = 0, held_ = 0;  // under memory.cc's mutex
};

// --- for tests -------------------------------------------------------------------------------------------------
// Each device has `bytes` from now on, and kDeviceBytes before the first call. What is taken stays taken, also where it
// is more: with 0, nothing is free, as when another process has taken the rest.
constexpr int64_t kDeviceBytes = int64_t{16} << 30;
void SetDeviceMemory(int64_t bytes);
// No code is loaded, as in a new process.
void UnloadModules();

}  // namespace precondor::cuda_host
