// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/staging.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/matrix_pieces.h"

namespace precondor::cuda {

absl::StatusOr<std::unique_ptr<Staging>> Staging::Make(cudaStream_t stream) {
  std::unique_ptr<Staging> staging(new Staging(stream));
  for (cudaStream_t* const own : {&staging->upload_stream_, &staging->download_stream_}) {
    PRECONDOR_RETURN_IF_ERROR(ToStatus("CUDA stream", cudaStreamCreateWithFlags(own, cudaStreamNonBlocking)));
  }
  PRECONDOR_ASSIGN_OR_RETURN(staging->matrices_, PinnedArena::Make(kMatrixBytes));
  PRECONDOR_ASSIGN_OR_RETURN(staging->tables_, PinnedArena::Make(kTableBytes));
  const MutexLock lock(staging->mu_);
  for (int i = 0; i < kBuffers; ++i) {
    Buffer& buffer = staging->free_.emplace_back();
    void* data = nullptr;
    cudaError_t error = cudaHostAlloc(&data, kBufferBytes, cudaHostAllocDefault);
    buffer.data = static_cast<char*>(data);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&buffer.landed, cudaEventDisableTiming);
    if (error != cudaSuccess) return ToStatus("pinned buffers", error);
  }
  return staging;
}

Staging::~Staging() {
  matrices_.reset();
  tables_.reset();
  for (const cudaStream_t own : {upload_stream_, download_stream_}) {
    if (own == nullptr) continue;
    cudaStreamSynchronize(own);
    cudaStreamDestroy(own);
  }
  const MutexLock lock(mu_);
  for (const Buffer& buffer : free_) {
    if (buffer.landed != nullptr) cudaEventDestroy(buffer.landed);
    if (buffer.data != nullptr) cudaFreeHost(buffer.data);
  }
}

Staging::Buffer Staging::Take() {
  const MutexLock lock(mu_);
  given_back_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !free_.empty(); });
  const Buffer buffer = free_.back();
  free_.pop_back();
  return buffer;
}

std::optional<Staging::Buffer> Staging::TryTake() {
  const MutexLock lock(mu_);
  if (free_.empty()) return std::nullopt;
  const Buffer buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Staging::GiveBack(Buffer buffer, cudaError_t error) {
  // A copy may still be running without an event that marks its end.
  if (error != cudaSuccess) {
    for (const cudaStream_t stream : {stream_, download_stream_}) (void)cudaStreamSynchronize(stream);
  }
  const MutexLock lock(mu_);
  free_.push_back(buffer);
  given_back_.notify_one();
}

cudaError_t Staging::Download(const void* device, int64_t device_pitch, int64_t width, int64_t rows, void* host,
                              int64_t host_pitch) {
  const cudaStream_t stream = width * rows < kLongBytes ? stream_ : download_stream_;
  std::optional<Landing> on_its_way;
  const auto land = [&] { return on_its_way ? Land(*std::exchange(on_its_way, std::nullopt)) : cudaSuccess; };
  cudaError_t error =
      ForEachPiece(kBufferBytes, width, rows, [&](int64_t row, int64_t count, int64_t begin, int64_t bytes) {
        // Two buffers, so that the device writes one while the host reads the other. A thread that holds a buffer never
        // waits for a second one, so threads cannot deadlock.
        std::optional<Buffer> buffer;
        if (on_its_way) buffer = TryTake();
        if (!buffer) {
          if (const cudaError_t error = land(); error != cudaSuccess) return error;
          buffer = Take();
        }
        cudaError_t error = cudaSuccess;
        if (row == 0 && begin == 0 && stream != stream_) {
          error = cudaEventRecord(buffer->landed, stream_);
          if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, buffer->landed, 0);
        }
        const char* from = static_cast<const char*>(device) + row * device_pitch + begin;
        if (error == cudaSuccess) {
          error = CopyRowsAsync(buffer->data, bytes, from, device_pitch, bytes, count, cudaMemcpyDeviceToHost, stream);
        }
        if (error == cudaSuccess) error = cudaEventRecord(buffer->landed, stream);
        if (error != cudaSuccess) {
          GiveBack(*buffer, error);
          return error;
        }
        error = land();
        on_its_way = Landing{*buffer, static_cast<char*>(host) + row * host_pitch + begin, host_pitch, bytes, count};
        return error;
      });
  const cudaError_t landed = land();
  return error == cudaSuccess ? landed : error;
}

cudaError_t Staging::Land(const Landing& landing) {
  const cudaError_t error = cudaEventSynchronize(landing.buffer.landed);
  if (error == cudaSuccess) {
    CopyRows(landing.buffer.data, landing.width, landing.width, landing.rows, landing.host, landing.host_pitch);
  }
  GiveBack(landing.buffer, error);
  return error;
}

}  // namespace precondor::cuda
