// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA runtime that kernels/cuda calls. Device memory is the host's; work runs in the order of its
// stream when a thread waits for the stream or for an event on it.
#include "tests/support/cuda_host/stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <cuda_profiler_api.h>
#include <deque>
#include <fcntl.h>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "kernels/base/mutex.h"
#include "tests/support/cuda_host/devices.h"

struct CUstream_st {
  struct Item {
    std::function<void()> work;
    bool even_when_lost = false;
  };
  const int device = precondor::cuda_host::CurrentDevice();
  precondor::Mutex queue_mu;
  std::deque<Item> queue;
  precondor::Mutex running_mu;  // work runs one at a time, whichever thread waits
};
struct CUevent_st {
  const int device = precondor::cuda_host::CurrentDevice();
  bool has_time = true;  // false of events made with cudaEventDisableTiming
  struct State {
    precondor::Mutex mu;
    cudaStream_t stream = nullptr;  // where it was recorded last
    uint64_t records = 0, passed = 0;
    std::chrono::steady_clock::time_point passed_at;
    bool HasPassed(uint64_t record) {
      const precondor::MutexLock lock(mu);
      return passed >= record;
    }
  };
  const std::shared_ptr<State> state = std::make_shared<State>();  // what is on the stream may outlive the event
};
struct CUmemPoolHandle_st {
  explicit CUmemPoolHandle_st(int number) : device(number), memory(number) {}
  const int device;
  precondor::cuda_host::PoolMemory memory;
};

namespace precondor::cuda_host {
namespace {

// $CUDA_HOST_WAITS, for programs that load the imitation as a server does: a file that receives the count of waits.
std::atomic<int64_t>* MakeWaits() {
  static std::atomic<int64_t> own = 0;
  const char* const path = std::getenv("CUDA_HOST_WAITS");
  const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(own)) != 0) return &own;
  void* const shared = mmap(nullptr, sizeof(own), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return shared == MAP_FAILED ? &own : static_cast<std::atomic<int64_t>*>(shared);
}
std::atomic<int64_t>& waits = *MakeWaits();

std::atomic<int64_t> uploads = 0;

Mutex mu;  // guards what follows
int64_t calls = 0;
int64_t failing_call = -1;
cudaError_t failure = cudaSuccess;
int64_t interrupted_call = -1;
std::function<void()> interruption;
std::set<int> lost;                             // devices
std::map<const void*, size_t> shared_bytes_of;  // kernels
int most_shared_bytes = 227 << 10;
int compute_capability = 9;  // its first number
std::atomic<int64_t> live_objects{0};
thread_local cudaError_t last_error = cudaSuccess;

struct PoolAllocation {
  cudaMemPool_t pool = nullptr;
  int64_t bytes = 0;
};
std::map<void*, PoolAllocation>& PoolAllocations() {
  static auto& allocations = *new std::map<void*, PoolAllocation>;  // under mu, as the rest
  return allocations;
}

// The stream of calls that name none: one of the current device.
cudaStream_t Named(cudaStream_t stream) {
  static auto& defaults = *new std::map<int, std::unique_ptr<CUstream_st>>;
  if (stream != nullptr) return stream;
  const MutexLock lock(mu);
  std::unique_ptr<CUstream_st>& of_device = defaults[CurrentDevice()];
  if (of_device == nullptr) of_device = std::make_unique<CUstream_st>();
  return of_device.get();
}

bool Lost(int device) {
  const MutexLock lock(mu);
  return lost.contains(device);
}

void Put(cudaStream_t stream, std::function<void()> work, bool even_when_lost) {
  stream = Named(stream);
  const MutexLock lock(stream->queue_mu);
  stream->queue.push_back({std::move(work), even_when_lost});
}

void Drain(cudaStream_t stream, const std::function<bool()>& done) {
  stream = Named(stream);
  const MutexLock run(stream->running_mu);
  while (!done()) {
    CUstream_st::Item item;
    {
      const MutexLock lock(stream->queue_mu);
      if (stream->queue.empty()) return;
      item = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    if (item.even_when_lost || !Lost(stream->device)) item.work();
  }
}

void CopyRows(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows) {
  for (size_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  }
}

}  // namespace

void Enqueue(cudaStream_t stream, std::function<void()> work) {
  Put(stream, std::move(work), /*even_when_lost=*/false);
}

// $CUDA_HOST_LOST_DEVICE, for programs that load the imitation as a server does: a file, and once it is there the
// device whose number it holds is lost.
bool LostByFile() {
  static const char* const path = std::getenv("CUDA_HOST_LOST_DEVICE");
  if (path == nullptr) return false;
  std::ifstream file(path);
  int device = -1;
  return file >> device && device == CurrentDevice();
}

cudaError_t CountCall() {
  MakeContext(CurrentDevice());
  const bool by_file = LostByFile();
  std::function<void()> first;
  {
    const MutexLock lock(mu);
    if (calls == interrupted_call) first = std::exchange(interruption, nullptr);
  }
  if (first) first();
  const MutexLock lock(mu);
  if (by_file && lost.insert(CurrentDevice()).second) failure = cudaErrorECCUncorrectable;
  if (lost.contains(CurrentDevice())) return last_error = failure;
  if (calls++ != failing_call) return cudaSuccess;
  last_error = failure;
  if (failure == cudaErrorIllegalAddress || failure == cudaErrorECCUncorrectable) lost.insert(CurrentDevice());
  return failure;
}

int64_t Waits() { return waits; }
int64_t Uploads() { return uploads; }
int64_t Calls() {
  const MutexLock lock(mu);
  return calls;
}
void FailCall(int64_t after, cudaError_t error) {
  const MutexLock lock(mu);
  failing_call = calls + after;
  failure = error;
}
void RunBefore(int64_t after, std::function<void()> what) {
  const MutexLock lock(mu);
  interrupted_call = calls + after;
  interruption = std::move(what);
}
void Recover() {
  const MutexLock lock(mu);
  failing_call = -1;
  lost.clear();
}
int DeviceOf(cudaStream_t stream) { return stream->device; }
int64_t LiveObjects() { return live_objects; }
size_t AllowedSharedBytes(const void* kernel) {
  const MutexLock lock(mu);
  const auto found = shared_bytes_of.find(kernel);
  return std::max(found == shared_bytes_of.end() ? size_t{0} : found->second, size_t{48} << 10);
}
void SetMostSharedBytes(int bytes) {
  const MutexLock lock(mu);
  most_shared_bytes = bytes;
}
void SetComputeCapability(int major) {
  const MutexLock lock(mu);
  compute_capability = major;
}
void AddLiveObjects(int64_t count) { live_objects += count; }

}  // namespace precondor::cuda_host

namespace host = precondor::cuda_host;

#define RETURN_IF_FAILED() \
  if (const cudaError_t error = host::CountCall(); error != cudaSuccess) return error

extern "C" {

int GetPrimaryContextState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = host::HasContext(device) ? 1 : 0;
  return 0;
}
cudaError_t cudaGetDeviceCount(int* count) {
  if (host::DeviceCount() < 0) return cudaErrorInsufficientDriver;  // leaves *count alone, as the real one does
  if (host::DeviceCount() == 0) return cudaErrorNoDevice;
  *count = host::DeviceCount();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return host::SetCurrentDevice(device) ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDevice(int* device) {
  *device = host::CurrentDevice();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  RETURN_IF_FAILED();
  if (device < 0 || device >= host::DeviceCount()) return cudaErrorInvalidDevice;
  *properties = {};
  std::memcpy(properties->uuid.bytes, host::DeviceUuid(device).data(), sizeof(properties->uuid.bytes));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const precondor::MutexLock lock(host::mu);
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? host::most_shared_bytes
           : attribute == cudaDevAttrComputeCapabilityMajor     ? host::compute_capability
                                                                : 1;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** found, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0;
  if (known) *found = reinterpret_cast<void*>(&GetPrimaryContextState);
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode of_thread = cudaStreamCaptureModeGlobal;
  std::swap(*mode, of_thread);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  RETURN_IF_FAILED();
  const precondor::MutexLock lock(host::mu);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > host::most_shared_bytes) {
    return cudaErrorInvalidValue;
  }
  host::shared_bytes_of[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(host::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return host::last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    default:
      return "another error";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "made on the host"; }

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  RETURN_IF_FAILED();
  *free_bytes = static_cast<size_t>(host::FreeMemory(host::CurrentDevice()));
  *total_bytes = static_cast<size_t>(host::TotalMemory());
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  RETURN_IF_FAILED();
  *stream = new CUstream_st;
  host::AddLiveObjects(1);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RETURN_IF_FAILED();
  {
    const precondor::MutexLock lock(host::Named(stream)->queue_mu);
    if (!host::Named(stream)->queue.empty()) ++host::waits;
  }
  host::Drain(stream, [] { return false; });
  return cudaSuccess;
}
// Asks without making progress: what is on the stream runs when the host waits for it.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  RETURN_IF_FAILED();
  const precondor::MutexLock lock(stream->queue_mu);
  return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  host::Drain(stream, [] { return false; });
  delete stream;
  host::AddLiveObjects(-1);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  RETURN_IF_FAILED();
  *event = new CUevent_st;
  (*event)->has_time = (flags & cudaEventDisableTiming) == 0;
  host::AddLiveObjects(1);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  host::AddLiveObjects(-1);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RETURN_IF_FAILED();
  stream = host::Named(stream);
  if (event->device != stream->device) return cudaErrorInvalidResourceHandle;
  const precondor::MutexLock lock(event->state->mu);
  event->state->stream = stream;
  host::Enqueue(stream, [state = event->state, record = ++event->state->records] {
    const precondor::MutexLock lock(state->mu);
    state->passed = record;
    state->passed_at = std::chrono::steady_clock::now();
  });
  return cudaSuccess;
}
// The host's time between the moments at which the streams reached the events.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  RETURN_IF_FAILED();
  if (!start->has_time || !end->has_time) return cudaErrorInvalidResourceHandle;
  std::chrono::steady_clock::time_point at[2];
  for (const cudaEvent_t event : {start, end}) {
    const precondor::MutexLock lock(event->state->mu);
    if (event->state->records == 0) return cudaErrorInvalidResourceHandle;
    if (event->state->passed < event->state->records) return cudaErrorNotReady;
    at[event == end] = event->state->passed_at;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(at[1] - at[0]).count();
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return host::CountCall(); }
cudaError_t cudaProfilerStop() { return host::CountCall(); }
// The stream goes on, as it would by itself, and says so when it is asked again: this counts as a wait.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  RETURN_IF_FAILED();
  cudaStream_t stream;
  {
    const precondor::MutexLock lock(event->state->mu);
    stream = event->state->stream;
    if (stream == nullptr || event->state->passed >= event->state->records) return cudaSuccess;
  }
  ++host::waits;
  host::Drain(stream, [] { return false; });
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RETURN_IF_FAILED();
  cudaStream_t stream;
  uint64_t record;
  {
    const precondor::MutexLock lock(event->state->mu);
    stream = event->state->stream;
    record = event->state->records;
    if (stream != nullptr && event->state->passed < record) ++host::waits;
  }
  if (stream == nullptr) return cudaSuccess;  // never recorded
  host::Drain(stream, [state = event->state, record] { return state->HasPassed(record); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  RETURN_IF_FAILED();
  const precondor::MutexLock lock(event->state->mu);
  const cudaStream_t on = event->state->stream;
  if (on == nullptr || on == stream) return cudaSuccess;  // never recorded; in order anyway
  host::Enqueue(stream, [state = event->state, on, record = event->state->records] {
    if (!state->HasPassed(record)) host::Drain(on, [&] { return state->HasPassed(record); });
  });
  return cudaSuccess;
}

// Every device reaches it.
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  RETURN_IF_FAILED();
  if (posix_memalign(data, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xff, std::min(bytes, size_t{1} << 20));
  host::AddLiveObjects(1);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  host::AddLiveObjects(-1);
  return cudaSuccess;
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  RETURN_IF_FAILED();
  *pool = new CUmemPoolHandle_st(properties->location.id);
  host::AddLiveObjects(1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete pool;
  host::AddLiveObjects(-1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return host::CountCall(); }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t) {
  RETURN_IF_FAILED();
  pool->memory.Trim();
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t pool, cudaStream_t) {
  RETURN_IF_FAILED();
  const auto size = static_cast<int64_t>(bytes);
  if (!pool->memory.Take(size)) return cudaErrorMemoryAllocation;
  *data = host::NewDeviceMemory(bytes);
  if (*data == nullptr) {
    pool->memory.Give(size);
    return cudaErrorMemoryAllocation;
  }
  const precondor::MutexLock lock(host::mu);
  host::PoolAllocations()[*data] = {pool, size};
  return cudaSuccess;
}
// Freeing counts as no call: nothing that fails may keep memory. The pool can use the bytes for the next allocation, as
// it comes later on the same stream.
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  {
    const precondor::MutexLock lock(host::mu);
    const auto found = host::PoolAllocations().find(data);
    if (found == host::PoolAllocations().end()) return cudaErrorInvalidValue;
    found->second.pool->memory.Give(found->second.bytes);
    host::PoolAllocations().erase(found);
  }
  host::Put(
      stream, [data] { host::FreeDeviceMemory(data); }, /*even_when_lost=*/true);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  RETURN_IF_FAILED();
  host::Enqueue(stream, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  RETURN_IF_FAILED();
  host::uploads += kind == cudaMemcpyHostToDevice;
  host::Enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  RETURN_IF_FAILED();
  host::uploads += kind == cudaMemcpyHostToDevice;
  if (width > to_pitch || width > from_pitch) return cudaErrorInvalidPitchValue;
  host::Enqueue(stream, [=] { host::CopyRows(to, to_pitch, from, from_pitch, width, rows); });
  return cudaSuccess;
}

}  // extern "C"
