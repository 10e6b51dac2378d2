// SPDX-License-Identifier: Apache-2.0
// One CUDA device as the backend uses it. A Device owns a stream, on which all work runs in the order of the calls; a
// memory pool; pinned buffers for copies between host and device; and the handles of cuBLAS and cuSOLVER.
//
// Each call makes this device the current one of the calling thread, so that one process can use several Devices. After
// a fault that makes the device unusable (an illegal address, an uncorrectable memory error) every call returns that
// fault at once. Thread-safe. All memory of a Device must be freed before the Device is destroyed.
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
#include "absl/container/flat_hash_map.h"
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
#include "kernels/cuda/staging.h"

namespace precondor::cuda {

// A cache of small free blocks of device memory, by size. A step takes and frees hundreds of them, and with the cache
// it does not ask CUDA for any.
//
// Blocks are free in stream order, as after cudaFreeAsync: work that was launched before Keep may still use a block,
// and work that is launched after Take may use it. Thread-safe.
class FreeBlocks {
 public:
  static constexpr int64_t kLargestBytes = int64_t{1} << 20;
  static constexpr int64_t kMostBytes = int64_t{64} << 20;  // limit on the sum of all kept blocks

  // Returns a kept block of exactly `bytes` bytes, or null if there is none.
  void* Take(int64_t bytes) {
    const MutexLock lock(mu_);
    const auto blocks = blocks_.find(bytes);
    if (blocks == blocks_.end() || blocks->second.empty()) return nullptr;
    void* const block = blocks->second.back();
    blocks->second.pop_back();
    bytes_ -= bytes;
    return block;
  }
  // Keeps the block and returns true. Returns false if the block is larger than kLargestBytes or the kept blocks would
  // exceed kMostBytes; the block then stays the caller's.
  bool Keep(void* block, int64_t bytes) {
    if (bytes > kLargestBytes) return false;
    const MutexLock lock(mu_);
    if (bytes > kMostBytes - bytes_) return false;
    blocks_[bytes].push_back(block);
    bytes_ += bytes;
    return true;
  }
  // Removes all kept blocks and returns them.
  std::vector<void*> Clear() {
    const MutexLock lock(mu_);
    std::vector<void*> all;
    for (const auto& [bytes, blocks] : blocks_) all.insert(all.end(), blocks.begin(), blocks.end());
    blocks_.clear();
    bytes_ = 0;
    return all;
  }

 private:
  Mutex mu_;
  absl::flat_hash_map<int64_t, std::vector<void*>> blocks_ ABSL_GUARDED_BY(mu_);  // by size
  int64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

class Device;

// Owns device memory for `size` elements of type T, whose contents are unspecified. The destructor frees it in stream
// order: work that was launched before may still use it.
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
  // Bytes of device memory that Allocate never hands out. CUDA takes memory after Make: for the code of this backend's
  // kernels, cuBLAS and cuSOLVER, which is loaded at its first launch, and for the kernels' local memory. The pool
  // rounds sizes up, and FreeBlocks keeps free blocks.
  static constexpr int64_t kReserveBytes = int64_t{1} << 30;

  // Opens CUDA device `index`. Returns Unavailable if it does not exist, and ResourceExhausted if no more than the
  // reserve is free. The memory limit is the smaller of memory_limit_bytes and what the device has free once the
  // libraries' handles, their workspace and the pinned buffers exist, less the reserve.
  static absl::StatusOr<std::unique_ptr<Device>> Make(int index, int64_t memory_limit_bytes);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t stream() const { return stream_; }
  // Calls `launch` with stream(). Returns the launch's error, with `what` in its message.
  absl::Status Run(absl::string_view what, absl::FunctionRef<cudaError_t(cudaStream_t)> launch);
  // Like Run, for the last launch of an operation that has already changed the caller's data: any error makes the
  // device unusable, and later calls return it.
  absl::Status RunOrMarkLost(absl::string_view what, absl::FunctionRef<cudaError_t(cudaStream_t)> launch);
  // Calls cuBLAS or cuSOLVER with its handle. One thread at a time uses a handle.
  absl::Status RunBlas(absl::string_view what, absl::FunctionRef<cublasStatus_t(cublasHandle_t)> call);
  absl::Status RunSolver(absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t)> call);
  // Like RunSolver, for a call that launches nothing; launch_count does not count it.
  absl::Status QuerySolver(absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t)> call);

  // Returns `bytes` bytes of memory, aligned to 256 bytes, for use in stream order. Returns ResourceExhausted, with the
  // numbers in the message, if the memory limit or the device has no room.
  absl::StatusOr<void*> Allocate(int64_t bytes, bool zeroed);
  // Frees `bytes` bytes that Allocate returned, in stream order.
  void Free(void* data, int64_t bytes);
  int64_t allocated_bytes() const { return allocated_bytes_; }
  int64_t memory_limit_bytes() const { return memory_limit_bytes_; }
  // See Backend::fault.
  absl::Status fault() const { return fault_.Get(); }
  // Waits for the stream and returns free memory of the pool to the driver.
  void Trim();

  // Copies in stream order. The caller may reuse `host` when the call returns.
  absl::Status Upload(ConstMatrixView host, MatrixView device);
  // Like Upload, into memory that no work under way uses: the copy may overlap earlier work, and later work follows it.
  absl::Status UploadToIdle(ConstMatrixView host, MatrixView device);
  // Returns when `host` is written. Waits for work that was launched before the call, and not for work launched during
  // the call.
  absl::Status Download(ConstMatrixView device, MatrixView host);
  absl::Status Copy(ConstMatrixView from, MatrixView to);

  template <typename T>
  absl::StatusOr<DeviceArray<T>> Array(int64_t size) {
    if (size == 0) return DeviceArray<T>();
    PRECONDOR_ASSIGN_OR_RETURN(void* const data, Allocate(size * static_cast<int64_t>(sizeof(T)), /*zeroed=*/false));
    return DeviceArray<T>(this, static_cast<T*>(data), size);
  }
  // Copies the elements of `host` to a new array.
  template <typename T>
  absl::StatusOr<DeviceArray<T>> Send(absl::Span<const T> host) {
    PRECONDOR_ASSIGN_OR_RETURN(DeviceArray<T> array, Array<T>(static_cast<int64_t>(host.size())));
    PRECONDOR_RETURN_IF_ERROR(UploadBytes(host.data(), static_cast<int64_t>(host.size() * sizeof(T)), array.data()));
    return array;
  }
  // Copies the elements of `host` to `array`, which has the same size.
  template <typename T>
  absl::Status Fill(const DeviceArray<T>& array, absl::Span<const T> host) {
    return UploadBytes(host.data(), static_cast<int64_t>(host.size() * sizeof(T)), array.data());
  }
  // Copies the first host.size() elements of `array` to the host. Waits for work that was launched before.
  template <typename T>
  absl::Status Receive(const DeviceArray<T>& array, absl::Span<T> host) {
    return DownloadBytes(array.data(), static_cast<int64_t>(host.size() * sizeof(T)), host.data());
  }

 private:
  explicit Device(int index, int64_t memory_limit_bytes);
  absl::Status Open();
  absl::Status MakeHandles();
  absl::Status SetMemoryLimit();
  // Makes the device current, or returns the device's fault if it has one.
  absl::Status Enter();
  // Returns the status of a call of the CUDA runtime. A fatal error makes the device unusable.
  absl::Status Checked(absl::string_view what, cudaError_t error);
  // Returns the status of a library's call. A library's error does not tell whether the device has a fault. So after an
  // error this asks the CUDA runtime, and returns the device's fault instead if it has one.
  absl::Status CheckedLibrary(absl::Status status, absl::string_view what);
  // Makes the device unusable: later calls return `fault`.
  void Lose(const absl::Status& fault);
  // Adds `bytes` to allocated_bytes_, or returns ResourceExhausted if the limit has no room for them.
  absl::Status CountAllocation(int64_t bytes);
  void FreeKept();  // empties free_blocks_
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

  Mutex blas_mu_, solver_mu_;  // two, because decompositions also use the host: products need not wait for them
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
