// SPDX-License-Identifier: Apache-2.0
// Pinned host buffers that copies between host and device go through, so that an upload need not wait for the device
// and a download runs at the bus' speed; and streams of their own for copies that take long, so that the device
// computes meanwhile, and the bus is used in both directions.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"

namespace precondor::cuda {

// `rows` rows of `width` bytes in the stream's order, as one copy where they lie one behind the other on both sides: a
// copy row by row takes the bus far longer.
cudaError_t CopyRowsAsync(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t width, int64_t rows,
                          cudaMemcpyKind kind, cudaStream_t stream);

// Thread-safe. A thread that finds all buffers in use waits for one. The device must be the thread's current one.
class Staging {
 public:
  static constexpr int kBuffers = 16;
  static constexpr int64_t kBufferBytes = int64_t{1} << 20;
  // From here on a download has a stream of its own; what is smaller must not wait there behind something long.
  static constexpr int64_t kLongBytes = int64_t{1} << 16;

  // `stream` is where work runs.
  static absl::StatusOr<std::unique_ptr<Staging>> Make(cudaStream_t stream);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // `rows` rows of `width` bytes, `pitch` bytes apart on either side; in the stream's order. The first copies out of
  // `host` before it returns, the second waits until the device has written.
  cudaError_t Upload(const void* host, int64_t host_pitch, int64_t width, int64_t rows, void* device,
                     int64_t device_pitch) {
    return UploadOn(stream_, host, host_pitch, width, rows, device, device_pitch);
  }
  // As Upload, into memory that nothing on the stream uses: it runs beside earlier work there, and ahead of later work.
  cudaError_t UploadToIdle(const void* host, int64_t host_pitch, int64_t width, int64_t rows, void* device,
                           int64_t device_pitch) {
    return UploadOn(upload_stream_, host, host_pitch, width, rows, device, device_pitch);
  }
  cudaError_t Download(const void* device, int64_t device_pitch, int64_t width, int64_t rows, void* host,
                       int64_t host_pitch);

 private:
  struct Buffer {
    char* data = nullptr;
    cudaEvent_t idle = nullptr;  // after the copy that used it last
  };
  // What the device writes into a buffer, and where it belongs.
  struct Landing {
    Buffer buffer;
    char* host = nullptr;
    int64_t host_pitch = 0, width = 0, rows = 0;
  };
  explicit Staging(cudaStream_t stream) : stream_(stream) {}
  cudaError_t UploadOn(cudaStream_t stream, const void* host, int64_t host_pitch, int64_t width, int64_t rows,
                       void* device, int64_t device_pitch);
  // Waits for it, copies it and gives its buffer back.
  cudaError_t Land(const Landing& landing);
  Buffer Take();
  // Nullopt where Take would wait.
  std::optional<Buffer> TryTake();
  // After a copy that ended with `error`.
  void GiveBack(Buffer buffer, cudaError_t error);

  const cudaStream_t stream_;
  cudaStream_t upload_stream_ = nullptr;
  cudaStream_t download_stream_ = nullptr;
  Mutex mu_;
  CondVar given_back_;
  std::deque<Buffer> free_
      ABSL_GUARDED_BY(mu_);  // the one that was used first in front: it is the likeliest to be idle
};

}  // namespace precondor::cuda
