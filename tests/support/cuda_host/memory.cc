// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_host/memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <utility>

#include "kernels/base/mutex.h"

namespace precondor::cuda_host {
namespace {

Mutex mu;  // guards what follows
int64_t total = kDeviceBytes;
std::map<int, int64_t>& Taken() {
  static auto& taken = *new std::map<int, int64_t>;  // by device
  return taken;
}
std::map<std::pair<int, const void*>, int64_t>& Loaded() {
  static auto& loaded = *new std::map<std::pair<int, const void*>, int64_t>;  // bytes, by device and module
  return loaded;
}

// $CUDA_HOST_MEMORY, for programs that load the imitation as a server does: a file with the number of bytes that each
// device has. A test changes it while the program runs.
int64_t Total() {
  static const char* const path = std::getenv("CUDA_HOST_MEMORY");
  if (path == nullptr) return total;
  std::ifstream file(path);
  int64_t bytes = 0;
  return file >> bytes ? bytes : total;
}

int64_t FreeLocked(int device) { return std::max<int64_t>(Total() - Taken()[device], 0); }

// The bytes that a pool takes from its device at once.
constexpr int64_t kPieceBytes = int64_t{2} << 20;
int64_t InPieces(int64_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes * kPieceBytes; }

bool TakeLocked(int device, int64_t bytes) {
  if (bytes > FreeLocked(device)) return false;
  Taken()[device] += bytes;
  return true;
}

}  // namespace

bool TakeMemory(int device, int64_t bytes) {
  const MutexLock lock(mu);
  return TakeLocked(device, bytes);
}

void GiveMemory(int device, int64_t bytes) {
  const MutexLock lock(mu);
  Taken()[device] -= bytes;
}

int64_t FreeMemory(int device) {
  const MutexLock lock(mu);
  return FreeLocked(device);
}

int64_t TotalMemory() {
  const MutexLock lock(mu);
  return Total();
}

bool LoadModule(int device, const void* module, int64_t bytes) {
  const MutexLock lock(mu);
  if (Loaded().contains({device, module})) return true;
  if (!TakeLocked(device, bytes)) return false;
  Loaded()[{device, module}] = bytes;
  return true;
}

PoolMemory::~PoolMemory() { GiveMemory(device_, held_); }

bool PoolMemory::Take(int64_t bytes) {
  const MutexLock lock(mu);
  const int64_t more = std::max<int64_t>(InPieces(used_ + bytes) - held_, 0);
  if (more > 0 && !TakeLocked(device_, more)) return false;
  used_ += bytes;
  held_ += more;
  return true;
}

void PoolMemory::Give(int64_t bytes) {
  const MutexLock lock(mu);
  used_ -= bytes;
}

void PoolMemory::Trim() {
  const MutexLock lock(mu);
  const int64_t needed = InPieces(used_);
  Taken()[device_] -= held_ - needed;
  held_ = needed;
}

void SetDeviceMemory(int64_t bytes) {
  const MutexLock lock(mu);
  total = bytes;
}

void UnloadModules() {
  const MutexLock lock(mu);
  for (const auto& [module, loaded_bytes] : Loaded()) Taken()[module.first] -= loaded_bytes;
  Loaded().clear();
}

}  // namespace precondor::cuda_host
