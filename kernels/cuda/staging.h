// SPDX-License-Identifier: Apache-2.0
// Pinned host buffers that copies between host and device go through, so that an upload need not wait for the device
// and a download runs at the bus' speed.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <deque>
#include <memory>

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

  static absl::StatusOr<std::unique_ptr<Staging>> Make(cudaStream_t stream);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // `rows` rows of `width` bytes, `pitch` bytes apart on either side; in the stream's order. The first copies out of
  // `host` before it returns, the second waits until the device has written.
  cudaError_t Upload(const void* host, int64_t host_pitch, int64_t width, int64_t rows, void* device,
                     int64_t device_pitch);
  cudaError_t Download(const void* device, int64_t device_pitch, int64_t width, int64_t rows, void* host,
                       int64_t host_pitch);

 private:
  struct Buffer {
    char* data = nullptr;
    cudaEvent_t idle = nullptr;  // after the copy that used it last
  };
  explicit Staging(cudaStream_t stream) : stream_(stream) {}
  Buffer Take();
  // After a copy that ended with `error`.
  void GiveBack(Buffer buffer, cudaError_t error);

  const cudaStream_t stream_;
  Mutex mu_;
  CondVar given_back_;
  std::deque<Buffer> free_
      ABSL_GUARDED_BY(mu_);  // the one that was used first in front: it is the likeliest to be idle
};

}  // namespace precondor::cuda
