// SPDX-License-Identifier: Apache-2.0
// Copies between host and device through pinned host memory, so that an upload need not wait for the device and a
// download runs at the speed of the bus. Long copies have streams of their own, so that the device computes meanwhile,
// and the bus is used in both directions. Tables, matrices and downloads have memory of their own: matrices that wait
// for the stream hold nothing that the next round needs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"

namespace precondor::cuda {

// Calls piece(row, rows, begin, bytes) for pieces of a matrix of `rows` rows of `width` bytes, each of at most
// `most_bytes`: whole rows, or bytes [begin, begin + bytes) of one row if a row has more. Stops after an error.
template <typename Piece>
cudaError_t ForEachPiece(int64_t most_bytes, int64_t width, int64_t rows, Piece piece) {
  const int64_t part = std::min(width, most_bytes);
  const int64_t together = std::max<int64_t>(1, most_bytes / std::max<int64_t>(part, 1));
  for (int64_t row = 0; row < rows; row += together) {
    for (int64_t begin = 0; begin < width; begin += part) {
      const cudaError_t error = piece(row, std::min(together, rows - row), begin, std::min(part, width - begin));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

// Copies `rows` rows of `width` bytes in stream order. Pitches are in bytes. If the rows are contiguous on both sides
// it makes one copy, because a copy row by row takes the bus far longer.
cudaError_t CopyRowsAsync(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows,
                          cudaMemcpyKind kind, cudaStream_t stream);
// Copies rows of host memory.
void CopyRows(const void* from, int64_t from_pitch, int64_t width, int64_t rows, void* to, int64_t to_pitch);

// A ring of pinned host memory for uploads of one purpose. An upload takes as many as it needs, and they are free again
// when its copy has run and all earlier ones have. Uploads wait only while the ring is full. Thread-safe. Precondition:
// the device is the calling thread's current one.
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

// Thread-safe. A call waits while all memory of its kind is in use. Precondition: the device is the calling thread's
// current one.
class Staging {
 public:
  static constexpr int kBuffers = 8;
  static constexpr int64_t kMatrixBytes = int64_t{16} << 20, kTableBytes = int64_t{8} << 20;
  static constexpr int64_t kBufferBytes = int64_t{1} << 20;
  // Smallest size in bytes of a download that has a stream of its own. A smaller one must not wait there behind a long
  // one.
  static constexpr int64_t kLongBytes = int64_t{1} << 16;

  // `stream` is the stream of the work.
  static absl::StatusOr<std::unique_ptr<Staging>> Make(cudaStream_t stream);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Upload and Download copy `rows` rows of `width` bytes, `pitch` bytes apart on either side, in the order of the
  // work's stream. Upload has copied from `host` when it returns, and Download has written to `host`.
  cudaError_t Upload(const void* host, int64_t host_pitch, int64_t width, int64_t rows, void* device,
                     int64_t device_pitch) {
    return matrices_->Upload(stream_, stream_, host, host_pitch, width, rows, device, device_pitch);
  }
  // Like Upload, for the tables of a round.
  cudaError_t UploadTable(const void* host, int64_t bytes, void* device) {
    return tables_->Upload(stream_, stream_, host, bytes, bytes, 1, device, bytes);
  }
  // Like Upload, into memory that no work on the stream uses: the copy may overlap earlier work, and later work follows
  // it.
  cudaError_t UploadToIdle(const void* host, int64_t host_pitch, int64_t width, int64_t rows, void* device,
                           int64_t device_pitch) {
    return matrices_->Upload(upload_stream_, stream_, host, host_pitch, width, rows, device, device_pitch);
  }
  cudaError_t Download(const void* device, int64_t device_pitch, int64_t width, int64_t rows, void* host,
                       int64_t host_pitch);

 private:
  struct Buffer {
    char* data = nullptr;
    cudaEvent_t landed = nullptr;
  };
  // A download under way: the buffer that the device writes, and where its rows belong on the host.
  struct Landing {
    Buffer buffer;
    char* host = nullptr;
    int64_t host_pitch = 0, width = 0, rows = 0;
  };
  explicit Staging(cudaStream_t stream) : stream_(stream) {}
  // Waits for the landing, copies its rows to the host and gives its buffer back.
  cudaError_t Land(const Landing& landing);
  // Returns a free buffer. Waits while there is none.
  Buffer Take();
  // Returns nullopt where Take would wait.
  std::optional<Buffer> TryTake();
  // Makes `buffer` free again after a copy that ended with `error`.
  void GiveBack(Buffer buffer, cudaError_t error);

  const cudaStream_t stream_;
  cudaStream_t upload_stream_ = nullptr;
  cudaStream_t download_stream_ = nullptr;
  std::unique_ptr<PinnedArena> matrices_, tables_;
  Mutex mu_;
  CondVar given_back_;
  std::vector<Buffer> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::cuda
