// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/cuda/launch_count.h"

namespace precondor::cuda {
namespace {

// NVIDIA's recommended workspace for Hopper. A workspace of our own keeps products bitwise equal from call to call.
constexpr int64_t kBlasWorkspaceBytes = int64_t{32} << 20;

// The host's imitation of CUDA fills reused memory with NaN, so that tests notice reads of memory that was never
// written.
#ifdef PRECONDOR_CUDA_ON_HOST
constexpr bool kFillsWithNan = true;
#else
constexpr bool kFillsWithNan = false;
#endif

int64_t Pitch(ConstMatrixView x) { return x.stride * static_cast<int64_t>(sizeof(float)); }
int64_t Width(ConstMatrixView x) { return x.cols * static_cast<int64_t>(sizeof(float)); }

}  // namespace

Device::Device(int index, int64_t memory_limit_bytes) : index_(index), memory_limit_bytes_(memory_limit_bytes) {}

absl::StatusOr<std::unique_ptr<Device>> Device::Make(int index, int64_t memory_limit_bytes) {
  int count = 0;
  PRECONDOR_RETURN_IF_ERROR(ToStatus("CUDA devices", cudaGetDeviceCount(&count)));
  if (index < 0 || index >= count) {
    return absl::UnavailableError(absl::StrCat("CUDA device: expected 0 ... ", count - 1, ", got ", index));
  }
  std::unique_ptr<Device> device(new Device(index, memory_limit_bytes));
  PRECONDOR_RETURN_IF_ERROR(device->Open());
  return device;
}

absl::Status Device::Open() {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  PRECONDOR_RETURN_IF_ERROR(CheckCapability(index_));
  int pools = 0;
  PRECONDOR_RETURN_IF_ERROR(
      ToStatus("CUDA device", cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, index_)));
  if (pools == 0) {
    return absl::UnavailableError(absl::StrCat("CUDA device ", index_, ": expected support of memory pools, got none"));
  }
  PRECONDOR_RETURN_IF_ERROR(ToStatus("CUDA stream", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = index_;
  PRECONDOR_RETURN_IF_ERROR(ToStatus("CUDA memory pool", cudaMemPoolCreate(&pool_, &properties)));
  uint64_t keep_all = std::numeric_limits<uint64_t>::max();
  PRECONDOR_RETURN_IF_ERROR(
      ToStatus("CUDA memory pool", cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all)));
  PRECONDOR_ASSIGN_OR_RETURN(staging_, Staging::Make(stream_));
  PRECONDOR_RETURN_IF_ERROR(
      ToStatus("cuBLAS workspace", cudaMallocFromPoolAsync(&blas_workspace_, kBlasWorkspaceBytes, pool_, stream_)));
  PRECONDOR_RETURN_IF_ERROR(CheckedLibrary(MakeHandles(), "CUDA libraries"));
  return SetMemoryLimit();
}

absl::Status Device::MakeHandles() {
  MutexLock blas_lock(blas_mu_);
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cuBLAS handle", cublasCreate(&blas_)));
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cuBLAS stream", cublasSetStream(blas_, stream_)));
  PRECONDOR_RETURN_IF_ERROR(
      ToStatus("cuBLAS workspace", cublasSetWorkspace(blas_, blas_workspace_, kBlasWorkspaceBytes)));
  // Partial sums of bf16 products stay in f32, whatever the type of the result.
  PRECONDOR_RETURN_IF_ERROR(ToStatus(
      "cuBLAS mode",
      cublasSetMathMode(
          blas_, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION))));
  MutexLock solver_lock(solver_mu_);
  PRECONDOR_RETURN_IF_ERROR(ToStatus("cuSOLVER handle", cusolverDnCreate(&solver_)));
  return ToStatus("cuSOLVER stream", cusolverDnSetStream(solver_, stream_));
}

absl::Status Device::SetMemoryLimit() {
  size_t free_bytes = 0, total_bytes = 0;
  PRECONDOR_RETURN_IF_ERROR(ToStatus("CUDA memory", cudaMemGetInfo(&free_bytes, &total_bytes)));
  const int64_t available = static_cast<int64_t>(free_bytes);
  if (available <= kReserveBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("CUDA device ", index_, ": expected more than ", kReserveBytes,
                                                     " bytes of free memory, which stay in reserve, got ", available,
                                                     " of ", total_bytes));
  }
  memory_limit_bytes_ = std::min(memory_limit_bytes_, available - kReserveBytes);
  return absl::OkStatus();
}

Device::~Device() {
  cudaSetDevice(index_);
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  {
    MutexLock lock(solver_mu_);
    if (solver_ != nullptr) cusolverDnDestroy(solver_);
  }
  {
    MutexLock lock(blas_mu_);
    if (blas_ != nullptr) cublasDestroy(blas_);
  }
  staging_.reset();
  FreeKept();
  if (blas_workspace_ != nullptr) cudaFreeAsync(blas_workspace_, stream_);
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  PRECONDOR_CHECK(allocated_bytes() == 0);
}

absl::Status Device::Enter() {
  PRECONDOR_RETURN_IF_ERROR(fault());
  return Checked("cudaSetDevice", cudaSetDevice(index_));
}

absl::Status Device::Checked(absl::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // otherwise the next launch would report it
  absl::Status status = ToStatus(what, error);
  if (IsFatal(error)) Lose(status);
  return status;
}

absl::Status Device::CheckedLibrary(absl::Status status, absl::string_view what) {
  if (status.ok()) return status;
  // The query finds faults of work that is still on the stream.
  cudaError_t error = cudaGetLastError();
  if (!IsFatal(error)) {
    const cudaError_t of_stream = cudaStreamQuery(stream_);
    if (of_stream != cudaSuccess && of_stream != cudaErrorNotReady) error = of_stream;
    (void)cudaGetLastError();
  }
  if (IsFatal(error)) return Checked(what, error);
  if (error == cudaSuccess || error == cudaErrorNotReady) return status;
  return absl::Status(status.code(), absl::StrCat(std::string(status.message()), ", after ", cudaGetErrorName(error)));
}

void Device::Lose(const absl::Status& fault) {
  fault_.Set(absl::InternalError(
      absl::StrCat("CUDA device ", index_, " is lost since this fault: ", std::string(fault.message()))));
}

absl::Status Device::Run(absl::string_view what, absl::FunctionRef<cudaError_t(cudaStream_t)> launch) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked(what, launch(stream_));
}

absl::Status Device::RunOrMarkLost(absl::string_view what, absl::FunctionRef<cudaError_t(cudaStream_t)> launch) {
  absl::Status status = Run(what, launch);
  if (!status.ok()) Lose(status);
  return status;
}

absl::Status Device::RunBlas(absl::string_view what, absl::FunctionRef<cublasStatus_t(cublasHandle_t)> call) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  MutexLock lock(blas_mu_);
  ++launch_count;
  return CheckedLibrary(ToStatus(what, call(blas_)), what);
}

absl::Status Device::RunSolver(absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t)> call) {
  ++launch_count;
  return QuerySolver(what, call);
}

absl::Status Device::QuerySolver(absl::string_view what, absl::FunctionRef<cusolverStatus_t(cusolverDnHandle_t)> call) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  MutexLock lock(solver_mu_);
  return CheckedLibrary(ToStatus(what, call(solver_)), what);
}

absl::Status Device::CountAllocation(int64_t bytes) {
  int64_t before = allocated_bytes_;
  do {
    if (bytes > memory_limit_bytes_ - before) {
      return absl::ResourceExhaustedError(absl::StrCat("cuda backend: expected at most ", memory_limit_bytes_,
                                                       " bytes in use, got ", before, " and a request for ", bytes));
    }
  } while (!allocated_bytes_.compare_exchange_weak(before, before + bytes));
  return absl::OkStatus();
}

absl::StatusOr<void*> Device::Allocate(int64_t bytes, bool zeroed) {
  PRECONDOR_RETURN_IF_ERROR(fault());
  PRECONDOR_RETURN_IF_ERROR(CountAllocation(bytes));
  void* data = free_blocks_.Take(bytes);
  const bool kept = data != nullptr, fills = zeroed || (kept && kFillsWithNan);
  if (kept && !fills) return data;
  cudaError_t error = cudaSetDevice(index_);
  if (error == cudaSuccess && !kept) error = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
  if (error == cudaSuccess && fills) error = cudaMemsetAsync(data, zeroed ? 0 : 0xff, bytes, stream_);
  if (error == cudaSuccess) return data;
  if (data != nullptr) (void)cudaFreeAsync(data, stream_);
  allocated_bytes_ -= bytes;
  return Checked(absl::StrCat("cuda backend: ", bytes, " bytes beside ", allocated_bytes(), " in use"), error);
}

void Device::Free(void* data, int64_t bytes) {
  if (!free_blocks_.Keep(data, bytes)) {
    FreeToPool(data);
    // The kept blocks may have sizes that no caller requests now.
    if (bytes <= FreeBlocks::kLargestBytes) FreeKept();
  }
  allocated_bytes_ -= bytes;
}

void Device::FreeKept() {
  for (void* const block : free_blocks_.Clear()) FreeToPool(block);
}

void Device::FreeToPool(void* data) {
  cudaSetDevice(index_);
  // A lost device has lost its memory too, so errors are ignored.
  if (cudaFreeAsync(data, stream_) != cudaSuccess) (void)cudaGetLastError();
}

void Device::Trim() {
  if (!Enter().ok()) return;
  FreeKept();
  // Freed memory returns to the pool only when the stream has reached the free.
  if (Checked("Trim", cudaStreamSynchronize(stream_)).ok()) (void)Checked("Trim", cudaMemPoolTrimTo(pool_, 0));
}

absl::Status Device::Upload(ConstMatrixView host, MatrixView device) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked("Upload",
                 staging_->Upload(host.data, Pitch(host), Width(host), host.rows, device.data, Pitch(device)));
}

absl::Status Device::UploadToIdle(ConstMatrixView host, MatrixView device) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked("Upload",
                 staging_->UploadToIdle(host.data, Pitch(host), Width(host), host.rows, device.data, Pitch(device)));
}

absl::Status Device::Download(ConstMatrixView device, MatrixView host) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked("Download",
                 staging_->Download(device.data, Pitch(device), Width(device), device.rows, host.data, Pitch(host)));
}

absl::Status Device::Copy(ConstMatrixView from, MatrixView to) {
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked("Copy", CopyRowsAsync(to.data, Pitch(to), from.data, Pitch(from), Width(from), from.rows,
                                       cudaMemcpyDeviceToDevice, stream_));
}

absl::Status Device::UploadBytes(const void* host, int64_t bytes, void* device) {
  if (bytes == 0) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked("Upload", staging_->UploadTable(host, bytes, device));
}

absl::Status Device::DownloadBytes(const void* device, int64_t bytes, void* host) {
  if (bytes == 0) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(Enter());
  return Checked("Download", staging_->Download(device, bytes, bytes, 1, host, bytes));
}

}  // namespace precondor::cuda
