// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <cuda_runtime_api.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/payload_facts.h"
#include "kernels/cuda/staging.h"

namespace precondor {
namespace {

using cuda::PayloadJob;
using cuda::PayloadSums;
using cuda::Staging;
using cuda::ToStatus;

// Number of payloads that one pass inspects.
constexpr int64_t kMostPayloads = 1024;

int64_t Pitch(ConstMatrixView x) { return x.stride * static_cast<int64_t>(sizeof(float)); }
int64_t Width(ConstMatrixView x) { return x.cols * static_cast<int64_t>(sizeof(float)); }

absl::Status Checked(absl::string_view what, cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();  // otherwise the next call of other code would report it
  return ToStatus(absl::StrCat("device plane: ", what), error);
}

// Returns whether this process has a context on the device. The runtime itself cannot tell.
bool HasContext(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  static const GetState kGetState = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 7000, cudaEnableDefault, &result);
    return error == cudaSuccess ? reinterpret_cast<GetState>(found) : nullptr;
  }();
  unsigned flags = 0;
  int active = 1;
  return kGetState == nullptr || kGetState(device, &flags, &active) != 0 || active != 0;
}

// Makes a device the thread's current one and restores the previous one at the end. Threads belong to the caller, which
// may use another device, and may record a graph on another thread: the calls in between do not end that.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = Checked("cudaGetDevice", cudaGetDevice(&before_));
    if (status_.ok() && before_ != device) {
      status_ = Checked("cudaSetDevice", cudaSetDevice(device));
      changed_ = status_.ok();
    }
    if (status_.ok()) status_ = Checked("capture mode", cudaThreadExchangeStreamCaptureMode(&capture_));
    relaxed_ = status_.ok();
  }
  ~OnDevice() {
    if (relaxed_) (void)cudaThreadExchangeStreamCaptureMode(&capture_);
    // cudaSetDevice makes a context, of .5 GB. A new thread's device is 0, which this process may not use at all.
    if (changed_ && HasContext(before_)) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaStreamCaptureMode capture_ = cudaStreamCaptureModeRelaxed;  // the thread's own, while this one is relaxed
  bool relaxed_ = false;
  absl::Status status_;
};

class ExportedRegion final : public SharedRegion {
 public:
  ExportedRegion(int device, void* data, int64_t bytes, std::string handle)
      : SharedRegion(static_cast<float*>(data), bytes, std::move(handle)), device_(device) {}
  ~ExportedRegion() override {
    const OnDevice current(device_);
    (void)Checked("cudaFree", cudaFree(data()));
  }

 private:
  const int device_;
};

class MappedRegion final : public SharedRegion {
 public:
  MappedRegion(int device, void* data, int64_t bytes)
      : SharedRegion(static_cast<float*>(data), bytes, ""), device_(device) {}
  ~MappedRegion() override {
    const OnDevice current(device_);
    (void)Checked("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(data()));
  }

 private:
  const int device_;
};

class CudaPlane final : public DevicePlane {
 public:
  explicit CudaPlane(int index) : index_(index) {}
  ~CudaPlane() override {
    const OnDevice current(index_);
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    staging_.reset();
    const MutexLock lock(mu_);
    for (const std::unique_ptr<PayloadMemory>& memory : payload_memory_) {
      cudaFree(memory->on_device);
      cudaFreeHost(memory->on_host);
    }
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Open() {
    int count = 0;
    PRECONDOR_RETURN_IF_ERROR(Checked("CUDA devices", cudaGetDeviceCount(&count)));
    if (index_ < 0 || index_ >= count) {
      return absl::UnavailableError(absl::StrCat("CUDA device: expected 0 ... ", count - 1, ", got ", index_));
    }
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    PRECONDOR_RETURN_IF_ERROR(cuda::CheckCapability(index_));
    cudaDeviceProp properties = {};
    PRECONDOR_RETURN_IF_ERROR(Checked("properties", cudaGetDeviceProperties(&properties, index_)));
    device_.assign(properties.uuid.bytes, sizeof(properties.uuid.bytes));
    return Checked("stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  const std::string& device() const override { return device_; }

  absl::StatusOr<std::unique_ptr<SharedRegion>> Export(int64_t bytes) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    void* data = nullptr;
    PRECONDOR_RETURN_IF_ERROR(Checked(absl::StrCat("ring of ", bytes, " bytes"), cudaMalloc(&data, bytes)));
    cudaIpcMemHandle_t handle = {};
    const absl::Status status = Checked("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, data));
    if (!status.ok()) {
      (void)cudaFree(data);
      return status;
    }
    return std::make_unique<ExportedRegion>(index_, data, bytes, std::string(handle.reserved, sizeof(handle.reserved)));
  }

  absl::StatusOr<std::unique_ptr<SharedRegion>> Map(absl::string_view handle, int64_t bytes) override {
    cudaIpcMemHandle_t opaque = {};
    if (handle.size() != sizeof(opaque.reserved)) {
      return absl::UnavailableError(absl::StrCat("device plane: expected a memory handle of ", sizeof(opaque.reserved),
                                                 " bytes, got ", handle.size()));
    }
    std::memcpy(opaque.reserved, handle.data(), handle.size());
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    void* data = nullptr;
    const absl::Status status =
        Checked("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle(&data, opaque, cudaIpcMemLazyEnablePeerAccess));
    if (!status.ok()) return absl::UnavailableError(status.message());
    return std::make_unique<MappedRegion>(index_, data, bytes);
  }

  absl::StatusOr<std::unique_ptr<Mark>> Record(void* stream) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    PRECONDOR_ASSIGN_OR_RETURN(const cudaEvent_t event, TakeEvent());
    auto mark = std::make_unique<EventMark>(*this, event);
    PRECONDOR_RETURN_IF_ERROR(Checked("cudaEventRecord", cudaEventRecord(event, static_cast<cudaStream_t>(stream))));
    return mark;
  }

  absl::StatusOr<bool> Reached(const Mark& mark) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    const cudaError_t error = cudaEventQuery(static_cast<const EventMark&>(mark).event());
    if (error != cudaErrorNotReady) {
      PRECONDOR_RETURN_IF_ERROR(Checked("the caller's stream", error));
      return true;
    }
    (void)cudaGetLastError();
    return false;
  }

  absl::Status Copy(absl::Span<const RegionCopy> copies) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    cudaError_t error = cudaSuccess;
    for (const auto& [from, to] : copies) {
      if (error != cudaSuccess) break;
      error = cuda::CopyRowsAsync(to.data, Pitch(to), from.data, Pitch(from), Width(from), from.rows,
                                  cudaMemcpyDeviceToDevice, stream_);
    }
    return AwaitStream("copy", error);
  }

  absl::Status Upload(ConstMatrixView host, MatrixView device) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    PRECONDOR_ASSIGN_OR_RETURN(Staging* const staging, OwnStaging());
    return AwaitStream("upload",
                       staging->Upload(host.data, Pitch(host), Width(host), host.rows, device.data, Pitch(device)));
  }

  absl::Status Download(ConstMatrixView device, MatrixView host) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    PRECONDOR_ASSIGN_OR_RETURN(Staging* const staging, OwnStaging());
    return Checked("download",
                   staging->Download(device.data, Pitch(device), Width(device), device.rows, host.data, Pitch(host)));
  }

  absl::StatusOr<std::vector<PayloadFacts>> Inspect(absl::Span<const ConstMatrixView> payloads) override {
    const OnDevice current(index_);
    PRECONDOR_RETURN_IF_ERROR(current.status());
    std::vector<PayloadFacts> facts;
    while (facts.size() < payloads.size()) {
      PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<PayloadMemory> memory, TakePayloadMemory());
      const absl::Status status = InspectSome(payloads.subspan(facts.size(), kMostPayloads), *memory, facts);
      const MutexLock lock(mu_);
      payload_memory_.push_back(std::move(memory));
      PRECONDOR_RETURN_IF_ERROR(status);
    }
    return facts;
  }

 private:
  // Memory of one pass over payloads, pinned on the host.
  struct PayloadTable {
    PayloadSums sums[kMostPayloads];
    PayloadJob jobs[kMostPayloads];
  };
  struct PayloadMemory {
    PayloadTable* on_host = nullptr;
    PayloadTable* on_device = nullptr;
  };

  class EventMark final : public Mark {
   public:
    EventMark(CudaPlane& plane, cudaEvent_t event) : plane_(plane), event_(event) {}
    ~EventMark() override {
      const MutexLock lock(plane_.mu_);
      plane_.events_.push_back(event_);
    }
    cudaEvent_t event() const { return event_; }

   private:
    CudaPlane& plane_;
    const cudaEvent_t event_;
  };

  absl::StatusOr<cudaEvent_t> TakeEvent() {
    {
      const MutexLock lock(mu_);
      if (!events_.empty()) {
        const cudaEvent_t event = events_.back();
        events_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    PRECONDOR_RETURN_IF_ERROR(Checked("event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    return event;
  }

  // Waits for the work on the stream, whose last call returned `error`, and returns the first error.
  absl::Status AwaitStream(absl::string_view what, cudaError_t error) {
    const cudaError_t waited = cudaStreamSynchronize(stream_);
    // The error may be that of an earlier call. The stream must not use the caller's memory any longer.
    if (waited != cudaSuccess) (void)cudaStreamSynchronize(stream_);
    return Checked(what, error == cudaSuccess ? waited : error);
  }

  absl::StatusOr<std::unique_ptr<PayloadMemory>> TakePayloadMemory() {
    auto memory = std::make_unique<PayloadMemory>();
    {
      const MutexLock lock(mu_);
      if (!payload_memory_.empty()) {
        memory = std::move(payload_memory_.back());
        payload_memory_.pop_back();
        return memory;
      }
    }
    void *on_host = nullptr, *on_device = nullptr;
    PRECONDOR_RETURN_IF_ERROR(
        Checked("tables of payloads", cudaHostAlloc(&on_host, sizeof(PayloadTable), cudaHostAllocDefault)));
    const absl::Status status = Checked("tables of payloads", cudaMalloc(&on_device, sizeof(PayloadTable)));
    if (!status.ok()) {
      (void)cudaFreeHost(on_host);
      return status;
    }
    memory->on_host = static_cast<PayloadTable*>(on_host);
    memory->on_device = static_cast<PayloadTable*>(on_device);
    return memory;
  }

  // Appends the facts of at most kMostPayloads payloads.
  absl::Status InspectSome(absl::Span<const ConstMatrixView> payloads, const PayloadMemory& memory,
                           std::vector<PayloadFacts>& facts) {
    int64_t blocks = 0;
    for (size_t i = 0; i < payloads.size(); ++i) {
      memory.on_host->jobs[i] = {.x = payloads[i], .sums = &memory.on_device->sums[i], .first = blocks};
      blocks += cuda::PayloadBlocks(payloads[i]);
    }
    const size_t sums_bytes = payloads.size() * sizeof(PayloadSums);
    cudaError_t error = cudaMemcpyAsync(memory.on_device->jobs, memory.on_host->jobs,
                                        payloads.size() * sizeof(PayloadJob), cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = cudaMemsetAsync(memory.on_device->sums, 0, sums_bytes, stream_);
    if (error == cudaSuccess) {
      error = cuda::SumPayloads(stream_, memory.on_device->jobs, static_cast<int>(payloads.size()), blocks);
    }
    if (error == cudaSuccess) {
      error =
          cudaMemcpyAsync(memory.on_host->sums, memory.on_device->sums, sums_bytes, cudaMemcpyDeviceToHost, stream_);
    }
    PRECONDOR_RETURN_IF_ERROR(AwaitStream("digest", error));
    for (size_t i = 0; i < payloads.size(); ++i) {
      const PayloadSums& sums = memory.on_host->sums[i];
      facts.push_back({.digest = sums.digest, .finite = sums.not_finite == 0});
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Staging*> OwnStaging() {
    const MutexLock lock(mu_);
    if (staging_ == nullptr) {
      PRECONDOR_ASSIGN_OR_RETURN(staging_, Staging::Make(stream_));
    }
    return staging_.get();
  }

  const int index_;
  // Constant after Open.
  std::string device_;
  cudaStream_t stream_ = nullptr;

  Mutex mu_;
  std::unique_ptr<Staging> staging_;                                                 // made once, under mu_
  std::vector<cudaEvent_t> events_ ABSL_GUARDED_BY(mu_);                             // events for reuse
  std::vector<std::unique_ptr<PayloadMemory>> payload_memory_ ABSL_GUARDED_BY(mu_);  // for reuse
};

}  // namespace

absl::StatusOr<std::unique_ptr<DevicePlane>> MakeCudaPlane(int device) {
  auto plane = std::make_unique<CudaPlane>(device);
  PRECONDOR_RETURN_IF_ERROR(plane->Open());
  return plane;
}

}  // namespace precondor
