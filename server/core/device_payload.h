// SPDX-License-Identifier: Apache-2.0
// Gradients and answers that are in the backend's device memory and need not come to the host.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"
#include "kernels/device_plane.h"

namespace precondor {

// Host bytes that one owner fills and then gives away.
using Payload = std::vector<uint8_t>;

// A gradient that its worker has written to memory of the backend's device and leaves alone until it has the answer.
struct DevicePayload {
  ConstMatrixView values;  // [d_out, d_in]
  PayloadFacts facts;
  std::shared_ptr<const void> memory;  // keeps it there
  int64_t bytes() const { return values.size() * static_cast<int64_t>(sizeof(float)); }
};

// An answer that stays in device memory for as long as it may be asked for. Thread-safe. Must not outlive its backend.
class DeviceAnswer {
 public:
  DeviceAnswer(Backend& backend, DeviceMatrix matrix) : backend_(backend), matrix_(std::move(matrix)) {}
  ConstMatrixView view() const { return matrix_.view(); }
  int64_t bytes() const { return view().size() * static_cast<int64_t>(sizeof(float)); }
  // Its f32 elements as they go over a socket. Errors: the backend's.
  absl::StatusOr<std::shared_ptr<const Payload>> Download() const {
    // Heap blocks are aligned for f32, and the wire's byte order is the host's.
    Payload host(static_cast<size_t>(bytes()));
    const ConstMatrixView from = view();
    const absl::Status status =
        backend_.Download(from, MatrixView(reinterpret_cast<float*>(host.data()), from.rows, from.cols));
    if (!status.ok()) return status;
    return std::make_shared<const Payload>(std::move(host));
  }

 private:
  Backend& backend_;
  const DeviceMatrix matrix_;
};

}  // namespace precondor
