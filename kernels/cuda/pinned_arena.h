// SPDX-License-Identifier: Apache-2.0
// Pinned host memory that uploads of one purpose pass through, so that an upload need not wait for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"

namespace precondor::cuda {

// Copies `rows` rows of `width` bytes in stream order. Pitches are in bytes. If the rows are contiguous on both sides
// it makes one copy, because a copy row by row takes the bus far longer.
cudaError_t CopyRowsAsync(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows,
                          cudaMemcpyKind kind, cudaStream_t stream);
// Copies rows of host memory.
void CopyRows(const void* from, int64_t from_pitch, int64_t width, int64_t rows, void* to, int64_t to_pitch);

// A ring of bytes. An upload takes as many as it needs, and they are free again when its copy has run and all earlier
// ones have. Uploads wait only while the ring is full. Thread-safe. Precondition: the device is the calling thread's
// current one.
class PinnedArena {
 public:
  // Largest number of bytes that one copy takes; a larger upload makes several copies.
  static constexpr int64_t kMostBytesOfCopy = int64_t{1} << 20;

  // `bytes` is at least kMostBytesOfCopy.
  static absl::StatusOr<std::unique_ptr<PinnedArena>> Make(int64_t bytes);
  ~PinnedArena();
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;

  // Copies `rows` rows of `width` bytes to the device, in the order of `stream`, and lets later work of `follower`
  // follow. Has copied from `host` when it returns.
  cudaError_t Upload(cudaStream_t stream, cudaStream_t follower, const void* host, int64_t host_pitch, int64_t width,
                     int64_t rows, void* device, int64_t device_pitch);

 private:
  // So many pieces have events of their own.
  static constexpr size_t kMostPieces = 1024;
  struct Piece {
    int64_t begin = 0, end = 0;
    uint64_t number = 0;
    cudaEvent_t idle = nullptr;  // recorded after the copy
    bool recorded = false;       // false while a thread fills the piece and starts its copy
  };

  explicit PinnedArena(int64_t bytes) : bytes_(bytes) {}
  // Returns a piece of `bytes` bytes in `piece`, which is null after an error. Waits while there is no room.
  cudaError_t Take(int64_t bytes, Piece*& piece);
  // Ends the use of a piece, whose copy is on `stream` unless `error` says that it may not be.
  cudaError_t Release(Piece& piece, cudaStream_t stream, cudaError_t error);
  // Returns where a piece of `bytes` bytes can begin; -1 while there is no room.
  int64_t FindRoom(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const int64_t bytes_;
  char* memory_ = nullptr;
  Mutex mu_;
  CondVar released_;
  std::deque<Piece> pieces_ ABSL_GUARDED_BY(mu_);  // in use, in the order of Take
  uint64_t last_number_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<cudaEvent_t> events_ ABSL_GUARDED_BY(mu_);  // for reuse
};

}  // namespace precondor::cuda
