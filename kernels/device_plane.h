// SPDX-License-Identifier: Apache-2.0
// What a shard and a worker of one host need to hand payloads over in the memory of one device, without the host's
// (docs/adr/0012-device-plane.md): the shard exports a ring, the worker maps it, and each copies on a stream of the
// plane's own. Neither waits for the other on a stream: the side that tells the peer that data is there has waited for
// it first, so that a peer that dies leaves no stream behind that waits without end.
//
// Threads: all calls from any thread, several at once. Views are f32, row-major, on the plane's device. Every call
// waits until the device has done what it asks for. Errors: Internal for the device's faults, ResourceExhausted for
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "kernels/base/matrix_view.h"

namespace precondor {

// Memory of a device in two processes. Its end frees it in the one that exported it: after the other has unmapped it,
// or is gone; and unmaps it in the other.
class SharedRing {
 public:
  virtual ~SharedRing() = default;
  // 256-byte aligned.
  float* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // What Map takes: bytes of the plane's own. Empty in the process that has mapped it.
  const std::string& handle() const { return handle_; }

 protected:
  SharedRing(float* data, int64_t bytes, std::string handle) : data_(data), bytes_(bytes), handle_(std::move(handle)) {}

 private:
  float* const data_;
  const int64_t bytes_;
  const std::string handle_;
};

// What is to be known of a payload before it is taken in.
struct PayloadFacts {
  uint64_t digest = 0;  // kernels/base/payload_digest.h
  bool finite = false;  // every element is
};

class DevicePlane {
 public:
  // A moment in the work of a stream.
  class Mark {
   public:
    virtual ~Mark() = default;
  };

  // Bytes of a ring are a multiple of these: what a device allocates in smaller pieces it cuts out of blocks, and
  // a process that maps a piece gets the block.
  static constexpr int64_t kRingGranularity = int64_t{2} << 20;

  virtual ~DevicePlane() = default;
  // The device's UUID, 16 bytes: the same in every process.
  virtual const std::string& device() const = 0;

  // `bytes` are rounded up to kRingGranularity.
  virtual absl::StatusOr<std::unique_ptr<SharedRing>> Export(int64_t bytes) = 0;
  // One that another process has exported. Unavailable, with the reason, where it cannot be had.
  virtual absl::StatusOr<std::unique_ptr<SharedRing>> Map(absl::string_view handle, int64_t bytes) = 0;

  // What the caller has put on `stream`, a cudaStream_t of this device (null: the default stream), up to now. Does not
  // wait. The mark must not outlive the plane.
  virtual absl::StatusOr<std::unique_ptr<Mark>> Record(void* stream) = 0;
  // Whether the device has come there. Does not wait: a caller's stream may never come.
  virtual absl::StatusOr<bool> Reached(const Mark& mark) = 0;

  virtual absl::Status Copy(ConstMatrixView from, MatrixView to) = 0;
  virtual absl::Status Upload(ConstMatrixView host, MatrixView device) = 0;
  virtual absl::Status Download(ConstMatrixView device, MatrixView host) = 0;
  virtual absl::StatusOr<PayloadFacts> Inspect(ConstMatrixView x) = 0;
};

}  // namespace precondor
