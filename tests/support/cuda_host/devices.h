// SPDX-License-Identifier: Apache-2.0
// The devices of the imitation.
#pragma once

#include <cstddef>
#include <string>

namespace precondor::cuda_host {

// The calling thread's, by cudaSetDevice.
int CurrentDevice();
bool SetCurrentDevice(int device);

// Whether the process has used the device since ForgetContexts.
bool HasContext(int device);
void MakeContext(int device);
void ForgetContexts();

// The number of devices; -1: no driver.
int DeviceCount();

// 16 bytes, equal in every process.
std::string DeviceUuid(int device);

// Memory of a device until it is freed; null when there is none.
void* NewDeviceMemory(size_t bytes);
void FreeDeviceMemory(void* data);

}  // namespace precondor::cuda_host
