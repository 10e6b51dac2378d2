// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_status.h"

namespace precondor::cuda {
namespace {

constexpr int64_t kAlignment = 256;

}  // namespace

cudaError_t CopyRowsAsync(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows,
                          cudaMemcpyKind kind, cudaStream_t stream) {
  if (rows == 1 || (to_pitch == width && from_pitch == width)) {
    return cudaMemcpyAsync(to, from, width * rows, kind, stream);
  }
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, rows, kind, stream);
}

void CopyRows(const void* from, int64_t from_pitch, int64_t width, int64_t rows, void* to, int64_t to_pitch) {
  if (from_pitch == width && to_pitch == width) {
    std::memcpy(to, from, width * rows);
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  }
}

absl::StatusOr<std::unique_ptr<PinnedArena>> PinnedArena::Make(int64_t bytes) {
  std::unique_ptr<PinnedArena> arena(new PinnedArena(bytes));
  void* memory = nullptr;
  PRECONDOR_RETURN_IF_ERROR(ToStatus("pinned arena", cudaHostAlloc(&memory, bytes, cudaHostAllocDefault)));
  arena->memory_ = static_cast<char*>(memory);
  return arena;
}

PinnedArena::~PinnedArena() {
  const MutexLock lock(mu_);
  for (const Piece& piece : pieces_) {
    cudaEventSynchronize(piece.idle);
    cudaEventDestroy(piece.idle);
  }
  for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  if (memory_ != nullptr) cudaFreeHost(memory_);
}

int64_t PinnedArena::FindRoom(int64_t bytes) const {
  if (pieces_.empty()) return 0;
  if (pieces_.size() >= kMostPieces) return -1;
  const int64_t first = pieces_.front().begin, end = pieces_.back().end;
  const bool wrapped = pieces_.back().begin < first;
  if (wrapped) return end + bytes <= first ? end : -1;
  if (end + bytes <= bytes_) return end;
  return bytes <= first ? 0 : -1;
}

cudaError_t PinnedArena::Take(int64_t bytes, Piece*& piece) {
  piece = nullptr;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  MutexLock lock(mu_);
  int64_t begin = FindRoom(bytes);
  while (begin < 0) {
    const Piece oldest = pieces_.front();
    if (!oldest.recorded) {
      released_.wait(mu_);
    } else {
      mu_.Unlock();
      // Another thread may free the piece meanwhile, and record the event again: then this waits longer than it must.
      const cudaError_t error = cudaEventSynchronize(oldest.idle);
      mu_.Lock();
      if (error != cudaSuccess) return error;
      if (!pieces_.empty() && pieces_.front().number == oldest.number) {
        events_.push_back(oldest.idle);
        pieces_.pop_front();
        released_.notify_all();
      }
    }
    begin = FindRoom(bytes);
  }
  Piece made = {.begin = begin, .end = begin + bytes, .number = ++last_number_};
  if (events_.empty()) {
    const cudaError_t error = cudaEventCreateWithFlags(&made.idle, cudaEventDisableTiming);
    if (error != cudaSuccess) return error;
  } else {
    made.idle = events_.back();
    events_.pop_back();
  }
  piece = &pieces_.emplace_back(made);
  return cudaSuccess;
}

cudaError_t PinnedArena::Release(Piece& piece, cudaStream_t stream, cudaError_t error) {
  if (error == cudaSuccess) error = cudaEventRecord(piece.idle, stream);
  // A copy may still be running without an event that marks its end.
  if (error != cudaSuccess) (void)cudaStreamSynchronize(stream);
  const MutexLock lock(mu_);
  piece.recorded = true;
  released_.notify_all();
  return error;
}

cudaError_t PinnedArena::Upload(cudaStream_t stream, cudaStream_t follower, const void* host, int64_t host_pitch,
                                int64_t width, int64_t rows, void* device, int64_t device_pitch) {
  const auto copy = [&](int64_t row, int64_t count, int64_t begin, int64_t bytes) {
    Piece* piece = nullptr;
    if (const cudaError_t error = Take(bytes * count, piece); error != cudaSuccess) return error;
    char* const pinned = memory_ + piece->begin;
    CopyRows(static_cast<const char*>(host) + row * host_pitch + begin, host_pitch, bytes, count, pinned, bytes);
    char* const to = static_cast<char*>(device) + row * device_pitch + begin;
    cudaError_t error = CopyRowsAsync(to, device_pitch, pinned, bytes, bytes, count, cudaMemcpyHostToDevice, stream);
    const cudaEvent_t idle = piece->idle;
    error = Release(*piece, stream, error);
    // The follower waits after the last piece only, when the earlier pieces have arrived or soon will. So work that
    // other threads launch meanwhile does not wait.
    const bool last = row + count == rows && begin + bytes == width;
    if (error == cudaSuccess && last && stream != follower) error = cudaStreamWaitEvent(follower, idle, 0);
    return error;
  };
  const cudaError_t error = ForEachPiece(kMostBytesOfCopy, width, rows, copy);
  // The caller may free memory that a copy still writes.
  if (error != cudaSuccess) (void)cudaStreamSynchronize(stream);
  return error;
}

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
