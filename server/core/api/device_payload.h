// SPDX-License-Identifier: Apache-2.0
// Gradients and answers in memory of the backend's device, which need not be copied to the host.
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

// Host bytes that one owner fills and then moves to another.
using Payload = std::vector<uint8_t>;

// A gradient that its worker has written to memory of the backend's device. The worker does not change it before it has
// the answer.
struct DevicePayload {
  ConstMatrixView values;  // [d_out, d_in]
  PayloadFacts facts;
  std::shared_ptr<const void> memory;  // keeps the memory allocated
  int64_t bytes() const { return values.size() * static_cast<int64_t>(sizeof(float)); }
};

// An answer that stays in device memory while ranks may ask for it. Thread-safe. Must not outlive its backend.
class DeviceAnswer {
 public:
  DeviceAnswer(Backend& backend, DeviceMatrix matrix) : backend_(backend), matrix_(std::move(matrix)) {}
  ConstMatrixView view() const { return matrix_.view(); }
  int64_t bytes() const { return view().size() * static_cast<int64_t>(sizeof(float)); }
  // Returns its f32 elements in wire form. Returns the backend's errors.
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
