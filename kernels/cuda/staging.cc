// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"

namespace precondor::cuda {
namespace {

void CopyRows(const char* from, int64_t from_pitch, int64_t width, int64_t rows, char* to, int64_t to_pitch) {
  if (from_pitch == width && to_pitch == width) {
    std::memcpy(to, from, width * rows);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_pitch, from + i * from_pitch, width);
}

// Calls `piece` for pieces of a matrix that fit a buffer: whole rows, or parts of one row if a row does not fit.
template <typename Piece>
cudaError_t ForEachPiece(int64_t width, int64_t rows, Piece piece) {
  const int64_t part = std::min(width, Staging::kBufferBytes);
  const int64_t together = std::max<int64_t>(1, Staging::kBufferBytes / std::max<int64_t>(part, 1));
  for (int64_t row = 0; row < rows; row += together) {
    for (int64_t begin = 0; begin < width; begin += part) {
      const cudaError_t error = piece(row, std::min(together, rows - row), begin, std::min(part, width - begin));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t CopyRowsAsync(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows,
                          cudaMemcpyKind kind, cudaStream_t stream) {
  if (rows == 1 || (to_pitch == width && from_pitch == width)) {
    return cudaMemcpyAsync(to, from, width * rows, kind, stream);
  }
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, kind, stream);
}

absl::StatusOr<std::unique_ptr<Staging>> Staging::Make(cudaStream_t stream) {
  std::unique_ptr<Staging> staging(new Staging(stream));
  for (cudaStream_t* const own : {&staging->upload_stream_, &staging->download_stream_}) {
    PRECONDOR_RETURN_IF_ERROR(ToStatus("CUDA stream", cudaStreamCreateWithFlags(own, cudaStreamNonBlocking)));
  }
  const MutexLock lock(staging->mu_);
  for (int i = 0; i < kBuffers; ++i) {
    Buffer& buffer = staging->free_.emplace_back();
    void* data = nullptr;
    cudaError_t error = cudaHostAlloc(&data, kBufferBytes, cudaHostAllocDefault);
    buffer.data = static_cast<char*>(data);
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&buffer.idle, cudaEventDisableTiming);
    if (error != cudaSuccess) return ToStatus("pinned buffers", error);
  }
  return staging;
}

Staging::~Staging() {
  for (const cudaStream_t own : {upload_stream_, download_stream_}) {
    if (own == nullptr) continue;
    cudaStreamSynchronize(own);
    cudaStreamDestroy(own);
  }
  const MutexLock lock(mu_);
  for (const Buffer& buffer : free_) {
    if (buffer.idle != nullptr) cudaEventDestroy(buffer.idle);
    if (buffer.data != nullptr) cudaFreeHost(buffer.data);
  }
}

Staging::Buffer Staging::Take() {
  const MutexLock lock(mu_);
  given_back_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !free_.empty(); });
  const Buffer buffer = free_.front();
  free_.pop_front();
  return buffer;
}

std::optional<Staging::Buffer> Staging::TryTake() {
  const MutexLock lock(mu_);
  if (free_.empty()) return std::nullopt;
  const Buffer buffer = free_.front();
  free_.pop_front();
  return buffer;
}

void Staging::GiveBack(Buffer buffer, cudaError_t error) {
  // A copy may still be running without an event that marks its end.
  if (error != cudaSuccess) {
    for (const cudaStream_t stream : {stream_, upload_stream_, download_stream_}) (void)cudaStreamSynchronize(stream);
  }
  const MutexLock lock(mu_);
  free_.push_back(buffer);
  given_back_.notify_one();
}

cudaError_t Staging::UploadOn(cudaStream_t stream, const void* host, int64_t host_pitch, int64_t width, int64_t rows,
                              void* device, int64_t device_pitch) {
  return ForEachPiece(width, rows, [&](int64_t row, int64_t count, int64_t begin, int64_t bytes) {
    const Buffer buffer = Take();
    cudaError_t error = cudaEventSynchronize(buffer.idle);
    if (error == cudaSuccess) {
      const char* from = static_cast<const char*>(host) + row * host_pitch + begin;
      CopyRows(from, host_pitch, bytes, count, buffer.data, bytes);
      char* to = static_cast<char*>(device) + row * device_pitch + begin;
      error = CopyRowsAsync(to, device_pitch, buffer.data, bytes, bytes, count, cudaMemcpyHostToDevice, stream);
    }
    if (error == cudaSuccess) error = cudaEventRecord(buffer.idle, stream);
    // The work's stream waits after the last piece only, when the earlier pieces have arrived or soon will. So work
    // that other threads launch meanwhile does not wait.
    const bool last = row + count == rows && begin + bytes == width;
    if (error == cudaSuccess && last && stream != stream_) error = cudaStreamWaitEvent(stream_, buffer.idle, 0);
    GiveBack(buffer, error);
    return error;
  });
}

cudaError_t Staging::Download(const void* device, int64_t device_pitch, int64_t width, int64_t rows, void* host,
                              int64_t host_pitch) {
  const cudaStream_t stream = width * rows < kLongBytes ? stream_ : download_stream_;
  std::optional<Landing> on_its_way;
  const auto land = [&] { return on_its_way ? Land(*std::exchange(on_its_way, std::nullopt)) : cudaSuccess; };
  cudaError_t error = ForEachPiece(width, rows, [&](int64_t row, int64_t count, int64_t begin, int64_t bytes) {
    // Two buffers, so that the device writes one while the host reads the other. A thread that holds a buffer never
    // waits for a second one, so threads cannot deadlock.
    std::optional<Buffer> buffer;
    if (on_its_way) buffer = TryTake();
    if (!buffer) {
      if (const cudaError_t error = land(); error != cudaSuccess) return error;
      buffer = Take();
    }
    // An upload, on any stream, may still be reading the buffer.
    cudaError_t error = cudaStreamWaitEvent(stream, buffer->idle, 0);
    if (error == cudaSuccess && row == 0 && begin == 0 && stream != stream_) {
      error = cudaEventRecord(buffer->idle, stream_);
      if (error == cudaSuccess) error = cudaStreamWaitEvent(stream, buffer->idle, 0);
    }
    const char* from = static_cast<const char*>(device) + row * device_pitch + begin;
    if (error == cudaSuccess) {
      error = CopyRowsAsync(buffer->data, bytes, from, device_pitch, bytes, count, cudaMemcpyDeviceToHost, stream);
    }
    if (error == cudaSuccess) error = cudaEventRecord(buffer->idle, stream);
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
  const cudaError_t error = cudaEventSynchronize(landing.buffer.idle);
  if (error == cudaSuccess) {
    CopyRows(landing.buffer.data, landing.width, landing.width, landing.rows, landing.host, landing.host_pitch);
  }
  GiveBack(landing.buffer, error);
  return error;
}

}  // namespace precondor::cuda
