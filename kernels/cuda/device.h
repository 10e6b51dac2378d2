// SPDX-License-Identifier: Apache-2.0
// One CUDA device as the backend uses it: a stream on which everything runs in the order of the calls, a pool of
// memory, pinned buffers between host and device, and the libraries' handles. Owns them all.
//
// Calls make this device the calling thread's current one, so that several Devices may serve one process. After a fault
// that ends the device's use (an illegal address, uncorrectable memory) every call returns that fault at once.
// Thread-safe. Memory of a Device must be freed before it dies.
#pragma once

#include <atomic>
#include <cstdint>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "kernels/base/first_error.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/free_blocks.h"
#include "kernels/cuda/library_status.h"
#include "kernels/cuda/staging.h"

namespace precondor::cuda {

class Device;

// Device memory for `size` Ts until death, contents unspecified. Death is in the stream's order: what was launched
// before may still use it.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(DeviceArray&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), data_(other.data_), size_(other.size_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray();

  T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  friend class Device;
  DeviceArray(Device* device, T* data, int64_t size) : device_(device), data_(data), size_(size) {}
  Device* device_ = nullptr;
  T* data_ = nullptr;
  int64_t size_ = 0;
};

class Device {
 public:
  // Device memory that Allocate never hands out. It is for what CUDA takes from the device after Make: kernels of this
  // backend, cuBLAS and cuSOLVER, which are loaded at their first launch, their local memory, what the pool rounds up,
  // and what FreeBlocks keeps.
  static constexpr int64_t kReserveBytes = int64_t{1} << 30;

  // Unavailable when there is no such device; ResourceExhausted when no more than the reserve is free. Bounds what
  // Allocate has handed out at a time: memory_limit_bytes, and what the device has free once the libraries' handles,
  // their workspace and the pinned buffers are made, less the reserve and what communicators with `peers` may take.
  // Those peers reach what Allocate hands out.
  static absl::StatusOr<std::unique_ptr<Device>> Make(int index, int64_t memory_limit_bytes,
                                                      const std::vector<int>& peers = {});
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t stream() const { return stream_; }
  // Launches through `launch`, on stream(). The launch's error, named after `what`.
  absl::Status Run(absl::string_view what, absl::FunctionRef<cudaError_t(cudaStream_t)> launch);
  // As Run, at the end of an operation that has changed what the caller keeps: its error, whatever it is, ends the
  // device's use.
  absl::Status RunOrLose(absl::string_view what, absl::FunctionRef<cudaError_t(cudaStream_t)> launch);
  // Calls a library with its handle, one thread at a time.
  absl::Status RunBlas(absl::string_view what, absl::FunctionRef<cublasStatus_t(cublasHandle_t)> call);
  absl::Status RunSolver(absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t)> call);
  // As RunSolver, of a call that launches nothing.
  absl::Status AskSolver(absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t)> call);

  // 256-byte aligned. ResourceExhausted names the numbers.
  absl::StatusOr<void*> Allocate(int64_t bytes, bool zeroed);
  void Free(void* data, int64_t bytes);
  int64_t allocated_bytes() const { return allocated_bytes_; }
  int64_t memory_limit_bytes() const { return memory_limit_bytes_; }
  // Backend::fault.
  absl::Status fault() const { return fault_.Get(); }
  // Gives the driver back what is free.
  void Trim();

  // In the stream's order. The host's memory may be reused on return.
  absl::Status Upload(ConstMatrixView host, MatrixView device);
  // The same into memory that nothing under way uses: copied beside what was launched before, ahead of what comes
  // after.
  absl::Status UploadToIdle(ConstMatrixView host, MatrixView device);
  // Waits for what was launched before, and not for what is launched meanwhile.
  absl::Status Download(ConstMatrixView device, MatrixView host);
  absl::Status Copy(ConstMatrixView from, MatrixView to);

  template <typename T>
  absl::StatusOr<DeviceArray<T>> Array(int64_t size) {
    if (size == 0) return DeviceArray<T>();
    PRECONDOR_ASSIGN_OR_RETURN(void* const data, Allocate(size * static_cast<int64_t>(sizeof(T)), /*zeroed=*/false));
    return DeviceArray<T>(this, static_cast<T*>(data), size);
  }
  // A copy of the host's elements for the device.
  template <typename T>
  absl::StatusOr<DeviceArray<T>> Send(absl::Span<const T> host) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceArray<T> array, Array<T>(static_cast<int64_t>(host.size())));
    PRECONDOR_RETURN_IF_ERROR(UploadBytes(host.data(), static_cast<int64_t>(host.size() * sizeof(T)), array.data()));
    return array;
  }
  // The host's elements into an array of as many.
  template <typename T>
  absl::Status Fill(const DeviceArray<T>& array, absl::Span<const T> host) {
    return UploadBytes(host.data(), static_cast<int64_t>(host.size() * sizeof(T)), array.data());
  }
  // The first elements of an array; waits for what was launched before.
  template <typename T>
  absl::Status Receive(const DeviceArray<T>& array, absl::Span<T> host) {
    return DownloadBytes(array.data(), static_cast<int64_t>(host.size() * sizeof(T)), host.data());
  }

 private:
  explicit Device(int index, int64_t memory_limit_bytes);
  absl::Status Open(const std::vector<int>& peers);
  absl::Status LetReach(const std::vector<int>& peers);
  absl::Status MakeHandles();
  absl::Status SetMemoryLimit(const std::vector<int>& peers);
  // Makes the device current; its fault if it had one.
  absl::Status Enter();
  absl::Status Checked(absl::string_view what, cudaError_t error);
  // The status of a library's call. A library's error does not tell a fault of the device from a refusal: after one,
  // the device is asked, and its fault takes the place of the library's error.
  absl::Status CheckedLibrary(absl::Status status, absl::string_view what);
  void Lose(const absl::Status& fault);
  // ResourceExhausted where the limit has no room for them.
  absl::Status CountAllocation(int64_t bytes);
  void FreeKept();  // free_blocks_
  void FreeToPool(void* data);
  absl::Status UploadBytes(const void* host, int64_t bytes, void* device);
  absl::Status DownloadBytes(const void* device, int64_t bytes, void* host);

  const int index_;
  int64_t memory_limit_bytes_;  // constant after Make
  cudaStream_t stream_ = nullptr;
  cudaMemPool_t pool_ = nullptr;
  FreeBlocks free_blocks_;
  std::unique_ptr<Staging> staging_;
  void* blas_workspace_ = nullptr;

  Mutex blas_mu_, solver_mu_;  // decompositions work on the host too: products do not wait for them
  cublasHandle_t blas_ ABSL_GUARDED_BY(blas_mu_) = nullptr;
  cusolverDnHandle_t solver_ ABSL_GUARDED_BY(solver_mu_) = nullptr;

  std::atomic<int64_t> allocated_bytes_ = 0;
  FirstError fault_;
};

template <typename T>
DeviceArray<T>::~DeviceArray() {
  if (device_ != nullptr) device_->Free(data_, size_ * static_cast<int64_t>(sizeof(T)));
}

}  // namespace precondor::cuda
