// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_host/devices.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "tests/support/cuda_host/stream.h"

namespace precondor::cuda_host {
namespace {

std::string UuidOfNumber(int number) {
  std::string uuid = "cuda on the host";
  uuid.back() = static_cast<char>('a' + number);
  return uuid;
}

std::string UuidText(int number) {
  std::string text = absl::BytesToHexString(UuidOfNumber(number));
  for (const size_t place : {20, 16, 12, 8}) text.insert(place, "-");
  return absl::StrCat("GPU-", text);
}

// Numbers of the machine's devices that this process may use, in its order: as many as $CUDA_HOST_DEVICES says, for
// programs that load the imitation as a server does, of which $CUDA_VISIBLE_DEVICES names some by number or by
// "GPU-UUID". As CUDA does, ignores what follows a name that no device has.
const std::vector<int>& Visible() {
  static const std::vector<int> visible = [] {
    const char* const count_text = std::getenv("CUDA_HOST_DEVICES");
    const int count = count_text == nullptr ? 1 : std::atoi(count_text);
    const char* const names = std::getenv("CUDA_VISIBLE_DEVICES");
    std::vector<int> devices;
    if (names == nullptr) {
      for (int device = 0; device < count; ++device) devices.push_back(device);
      return devices;
    }
    for (const absl::string_view name : absl::StrSplit(names, ',')) {
      int device = 0;
      while (device < count && name != absl::StrCat(device) && name != UuidText(device)) ++device;
      if (device == count) break;
      devices.push_back(device);
    }
    return devices;
  }();
  return visible;
}

std::atomic<int> device_count{static_cast<int>(Visible().size())};
thread_local int current_device = 0;
std::atomic<uint64_t> contexts = 0;  // a bit for each device

}  // namespace

int CurrentDevice() { return current_device; }

bool SetCurrentDevice(int device) {
  if (device < 0 || device >= device_count) return false;
  current_device = device;
  MakeContext(device);
  return true;
}

bool HasContext(int device) { return (contexts >> device & 1) != 0; }
void MakeContext(int device) { contexts |= uint64_t{1} << device; }
void ForgetContexts() { contexts = 0; }

int DeviceCount() { return device_count; }

std::string DeviceUuid(int device) {
  const std::vector<int>& visible = Visible();
  const auto place = static_cast<size_t>(device);
  return UuidOfNumber(place < visible.size() ? visible[place] : device);
}
void SetDeviceCount(int count) { device_count = count; }

void* NewDeviceMemory(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, 256, bytes) != 0) return nullptr;
  // NaN in every f32 and f64 of the first MiB, so that no code takes memory for zeroed.
  std::memset(data, 0xff, std::min(bytes, size_t{1} << 20));
  AddLiveObjects(1);
  return data;
}

void FreeDeviceMemory(void* data) {
  std::free(data);
  AddLiveObjects(-1);
}

}  // namespace precondor::cuda_host
