// SPDX-License-Identifier: Apache-2.0
// The answer to a gradient in device memory, whichever way it comes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"

#include "client/cpp/src/result_state.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// Writes to `out`, on the plane's device, before it tells `future`; and uses the caller's memory no more once it has,
// the caller that made it: Fail waits for a use under way.
class DeviceAnswer final : public AnswerSink {
 public:
  DeviceAnswer(std::string what, std::shared_ptr<DevicePlane> plane, MatrixView out,
               std::shared_ptr<PreconditionFuture::State> future)
      : what_(std::move(what)), plane_(std::move(plane)), out_(out), future_(std::move(future)) {}

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  absl::Status TakeFromSlot(const float* values) override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  bool ready() const override { return future_->ready(); }

  // Calls `use`, which may use the caller's memory until it returns, and must not call back. Cancelled, and no call,
  // when there is an outcome.
  absl::Status WithMemory(absl::FunctionRef<absl::Status()> use);

 private:
  // One that comes as bytes, on its way through the host.
  struct Host {
    std::vector<float> values;
    std::unique_ptr<PreconditionFuture::State> state;
  };
  std::shared_ptr<Host> host() const;

  const std::string what_;
  const std::shared_ptr<DevicePlane> plane_;
  const MatrixView out_;
  const std::shared_ptr<PreconditionFuture::State> future_;
  Mutex memory_mu_;  // whose holder uses the caller's memory, or ends that; waits for the device. Before mu_
  mutable Mutex mu_;
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
