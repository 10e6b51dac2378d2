// SPDX-License-Identifier: Apache-2.0
// Receives the answer to a gradient in device memory, from a slot or as bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"

#include "client/cpp/src/result_state.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// Writes the answer to `out` on the plane's device, and then sets the outcome of `future`. It does not use the caller's
// memory after that: Fail waits until a use in progress ends. Thread-safe.
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

  // Calls `use`, which may use the caller's memory until it returns and must not call this object. Returns CANCELLED
  // without calling `use` if there is an outcome.
  absl::Status WithMemory(absl::FunctionRef<absl::Status()> use);

 private:
  // Host memory for an answer that arrives as bytes.
  struct Host {
    std::vector<float> values;
    std::unique_ptr<PreconditionFuture::State> state;
  };
  std::shared_ptr<Host> host() const;

  const std::string what_;
  const std::shared_ptr<DevicePlane> plane_;
  const MatrixView out_;
  const std::shared_ptr<PreconditionFuture::State> future_;
  // Held while the caller's memory is used, and while the outcome is set; device copies run under it. Taken before mu_.
  Mutex memory_mu_;
  mutable Mutex mu_;
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
