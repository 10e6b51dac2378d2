// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_host/devices.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/mutex.h"
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

struct Memory {
  size_t bytes = 0;  // whole pages; 0: on the heap, since there was one device
  int device = 0;
};

// It guards everything below, and it is held while a device works: the handler runs on the thread that holds it.
Mutex work_mu;
thread_local int holds = 0;  // of this thread

// Once a thread, however often it asks.
void Hold() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (holds++ == 0) work_mu.Lock();
}
void Release() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (--holds == 0) work_mu.Unlock();
}
struct Holding {
  Holding() { Hold(); }
  ~Holding() { Release(); }
};

std::map<char*, Memory>& Memories() {
  static auto& memories = *new std::map<char*, Memory>;
  return memories;
}
int working = -1;  // the device whose memory can be reached

void Protect(char* data, const Memory& memory, bool within_reach) {
  if (memory.bytes == 0) return;
  if (mprotect(data, memory.bytes, within_reach ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) std::abort();
}

void SwitchTo(int device) {
  if (device == working) return;
  for (const auto& [data, memory] : Memories()) {
    if (memory.device == working || memory.device == device) Protect(data, memory, memory.device == device);
  }
  working = device;
}

void OnFault(int signal, siginfo_t* info, void*) {
  auto* const address = static_cast<char*>(info->si_addr);
  auto found = Memories().upper_bound(address);
  if (found != Memories().begin() && address < std::prev(found)->first + std::prev(found)->second.bytes) {
    char text[100];
    const int length = std::snprintf(text, sizeof(text), "device %d touches memory of device %d\n", working,
                                     std::prev(found)->second.device);
    (void)!write(STDERR_FILENO, text, static_cast<size_t>(length));
    _exit(1);
  }
  std::signal(signal, SIG_DFL);  // and again
}

void* NewPages(size_t bytes) {
  static const bool handled = [] {
    struct sigaction action = {};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGSEGV, &action, nullptr) == 0;
  }();
  if (!handled) return nullptr;
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

}  // namespace

int CurrentDevice() { return current_device; }

bool SetCurrentDevice(int device) {
  if (device < 0 || device >= device_count) return false;
  current_device = device;
  return true;
}

int DeviceCount() { return device_count; }

std::string DeviceUuid(int device) {
  const std::vector<int>& visible = Visible();
  const auto place = static_cast<size_t>(device);
  return UuidOfNumber(place < visible.size() ? visible[place] : device);
}
void SetDeviceCount(int count) { device_count = count; }

void* NewDeviceMemory(size_t bytes, int device) {
  const Holding holding;
  Memory memory{.bytes = 0, .device = device};
  void* data = nullptr;
  if (device_count > 1) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    memory.bytes = std::max<size_t>((bytes + page - 1) / page, 1) * page;
    data = NewPages(memory.bytes);
  } else if (posix_memalign(&data, 256, bytes) != 0) {
    data = nullptr;
  }
  if (data == nullptr) return nullptr;
  // NaN in every f32 and f64 of the first MiB, so that no code takes memory for zeroed.
  std::memset(data, 0xff, std::min(bytes, size_t{1} << 20));
  if (device != working) Protect(static_cast<char*>(data), memory, false);
  Memories().emplace(static_cast<char*>(data), memory);
  AddLiveObjects(1);
  return data;
}

void FreeDeviceMemory(void* data) {
  const Holding holding;
  const auto found = Memories().find(static_cast<char*>(data));
  if (found == Memories().end()) std::abort();
  if (found->second.bytes == 0) {
    std::free(data);
  } else {
    munmap(data, found->second.bytes);
  }
  Memories().erase(found);
  AddLiveObjects(-1);
}

WorkScope::WorkScope(int device) : alone_(device_count <= 1) {
  if (alone_) return;
  if (holds > 0) outer_ = working;
  Hold();
  SwitchTo(device);
}

WorkScope::~WorkScope() {
  if (alone_) return;
  if (outer_ >= 0) SwitchTo(outer_);
  Release();
}

}  // namespace precondor::cuda_host
