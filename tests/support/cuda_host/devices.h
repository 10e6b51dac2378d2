// SPDX-License-Identifier: Apache-2.0
// Several devices: the memory of each is out of reach while another one works.
#pragma once

#include <cstddef>
#include <string>

namespace precondor::cuda_host {

// The calling thread's, by cudaSetDevice.
int CurrentDevice();
bool SetCurrentDevice(int device);

// The number of devices; -1: no driver.
int DeviceCount();

// 16 bytes, equal in every process.
std::string DeviceUuid(int device);

// Memory of a device for as long as it is not freed; null when there is none. Where there are several devices it has
// pages of its own: a touch of it within another device's WorkScope ends the process, with a message.
void* NewDeviceMemory(size_t bytes, int device);
void FreeDeviceMemory(void* data);

// A device works. Where there are several, one thread at a time; a scope within a scope of the thread puts the outer
// one's device back.
class WorkScope {
 public:
  explicit WorkScope(int device);
  ~WorkScope();
  WorkScope(const WorkScope&) = delete;
  WorkScope& operator=(const WorkScope&) = delete;

 private:
  const bool alone_;  // there is one device
  int outer_ = -1;
};

}  // namespace precondor::cuda_host
