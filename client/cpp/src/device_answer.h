// SPDX-License-Identifier: Apache-2.0
// The answer to a gradient in device memory, whichever way it comes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/cpp/src/result_state.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"

namespace precondor {

// Writes to `out`, on the plane's device, before it tells `future`.
class DeviceAnswer final : public AnswerSink {
 public:
  DeviceAnswer(std::string what, std::shared_ptr<DevicePlane> plane, MatrixView out,
               std::shared_ptr<PreconditionFuture::State> future)
      : what_(std::move(what)), plane_(std::move(plane)), out_(out), future_(std::move(future)) {}

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  absl::Status TakeFromRing(const float* values) override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override { return future_->Fail(std::move(status)); }
  bool ready() const override { return future_->ready(); }

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
  mutable Mutex mu_;
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
