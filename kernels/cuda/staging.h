// SPDX-License-Identifier: Apache-2.0
// Copies between host and device through pinned host memory, so that an upload need not wait for the device and a
// download runs at the speed of the bus. Long copies have streams of their own, so that the device computes meanwhile,
// and the bus is used in both directions. Tables, matrices and downloads have memory of their own: matrices that wait
// for the stream hold nothing that the next round needs.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "kernels/cuda/pinned_arena.h"

namespace precondor::cuda {

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
