// SPDX-License-Identifier: Apache-2.0
// Memory of cudaMalloc, which other processes may map by its handle: files without a name, which the system frees with
// the last process that has them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tuple>
#include <unistd.h>

#include "kernels/base/mutex.h"
#include "tests/support/cuda_host/stream.h"

namespace precondor::cuda_host {
namespace {

// The content of a cudaIpcMemHandle_t. The inode tells a descriptor that has become another file's.
struct Handle {
  pid_t pid = 0;
  int fd = -1;
  ino_t inode = 0;
  size_t bytes = 0;
  bool operator<(const Handle& other) const { return std::tie(pid, inode) < std::tie(other.pid, other.inode); }
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t));

struct Allocation {
  int fd = -1;
  size_t bytes = 0;
  int device = 0;
};
struct Mapping {
  void* data = nullptr;
  int uses = 0;
};

Mutex mu;
// Never destroyed: a plane may free its memory at the process' end.
std::map<void*, Allocation>& Allocations() {
  static auto& allocations = *new std::map<void*, Allocation>;
  return allocations;
}
std::map<Handle, Mapping>& Mappings() {
  static auto& mappings = *new std::map<Handle, Mapping>;
  return mappings;
}

void* MapFile(int fd, size_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return data == MAP_FAILED ? nullptr : data;
}

cudaError_t OpenFile(const Handle& handle, void** data) {
  char path[64];
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", static_cast<int>(handle.pid), handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return cudaErrorInvalidResourceHandle;
  struct stat file = {};
  const bool same = fstat(fd, &file) == 0 && file.st_ino == handle.inode;
  *data = same ? MapFile(fd, handle.bytes) : nullptr;
  close(fd);
  if (!same) return cudaErrorInvalidResourceHandle;
  return *data == nullptr ? cudaErrorMapBufferObjectFailed : cudaSuccess;
}

}  // namespace
}  // namespace precondor::cuda_host

namespace host = precondor::cuda_host;

#define RETURN_IF_FAILED() \
  if (const cudaError_t error = host::CountCall(); error != cudaSuccess) return error

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  RETURN_IF_FAILED();
  const int device = host::CurrentDevice();
  if (!host::TakeMemory(device, static_cast<int64_t>(bytes))) return cudaErrorMemoryAllocation;
  const int fd = memfd_create("cuda-on-the-host", MFD_CLOEXEC);
  *data = fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? host::MapFile(fd, bytes) : nullptr;
  if (*data == nullptr) {
    if (fd >= 0) close(fd);
    host::GiveMemory(device, static_cast<int64_t>(bytes));
    return cudaErrorMemoryAllocation;
  }
  std::memset(*data, 0xff, std::min(bytes, size_t{1} << 20));  // NaN, as memory of a pool
  const precondor::MutexLock lock(host::mu);
  host::Allocations()[*data] = {fd, bytes, device};
  host::AddLiveObjects(1);
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  const precondor::MutexLock lock(host::mu);
  const auto found = host::Allocations().find(data);
  if (found == host::Allocations().end()) return cudaErrorInvalidValue;
  munmap(data, found->second.bytes);
  close(found->second.fd);
  host::GiveMemory(found->second.device, static_cast<int64_t>(found->second.bytes));
  host::Allocations().erase(found);
  host::AddLiveObjects(-1);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* out, void* data) {
  RETURN_IF_FAILED();
  const precondor::MutexLock lock(host::mu);
  const auto found = host::Allocations().find(data);
  if (found == host::Allocations().end()) return cudaErrorInvalidValue;  // of a pool, or not the beginning
  struct stat file = {};
  if (fstat(found->second.fd, &file) != 0) return cudaErrorMapBufferObjectFailed;
  const host::Handle handle{getpid(), found->second.fd, file.st_ino, found->second.bytes};
  *out = {};
  std::memcpy(out->reserved, &handle, sizeof(handle));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t opaque, unsigned) {
  RETURN_IF_FAILED();
  host::Handle handle;
  std::memcpy(&handle, opaque.reserved, sizeof(handle));
  if (handle.pid == getpid()) return cudaErrorDeviceUninitialized;  // a process may not map its own
  const precondor::MutexLock lock(host::mu);
  host::Mapping& mapping = host::Mappings()[handle];
  if (mapping.uses == 0) {
    const cudaError_t error = host::OpenFile(handle, &mapping.data);
    if (error != cudaSuccess) {
      host::Mappings().erase(handle);
      return error;
    }
    host::AddLiveObjects(1);
  }
  ++mapping.uses;
  *data = mapping.data;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* data) {
  const precondor::MutexLock lock(host::mu);
  for (auto it = host::Mappings().begin(); it != host::Mappings().end(); ++it) {
    if (it->second.data != data) continue;
    if (--it->second.uses > 0) return cudaSuccess;
    munmap(data, it->first.bytes);
    host::Mappings().erase(it);
    host::AddLiveObjects(-1);
    return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

}  // extern "C"
