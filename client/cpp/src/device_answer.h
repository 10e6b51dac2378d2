// SPDX-License-Identifier: Apache-2.0
// Receives the answer to a gradient in device memory, from a slot or as bytes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/cpp/src/plane_table.h"
#include "client/cpp/src/result_state.h"
#include "kernels/base/mutex.h"

namespace precondor {

// Writes the answer to `out` on the plane's device, and then sets the outcome of `future`. It does not use the caller's
// memory after that: Fail waits until a use in progress ends. Thread-safe. `plane` outlives this object.
class DeviceAnswer final : public AnswerSink {
 public:
  DeviceAnswer(std::string what, WorkerPlane& plane, MatrixView out, std::shared_ptr<PreconditionFuture::State> future)
      : what_(std::move(what)), plane_(plane), out_(out), future_(std::move(future)) {}

  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;
  void TakeFromSlot(const float* values, size_t outstanding, RegionCopyQueue::Done done) override;
  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  bool ready() const override { return future_->ready(); }

  // Begins a use of the caller's memory. Waits until an earlier use ends. Returns false, and begins none, if there is
  // an outcome. A thread must end its use before it sets the outcome.
  bool BeginUse();
  void EndUse();

 private:
  // Host memory for an answer that arrives as bytes.
  struct Host {
    std::vector<float> values;
    std::unique_ptr<PreconditionFuture::State> state;
  };
  std::shared_ptr<Host> host() const;
  // Like BeginUse; no use begins afterwards. The caller sets the outcome and then calls EndUse.
  bool BeginLastUse();

  const std::string what_;
  WorkerPlane& plane_;
  const MatrixView out_;
  const std::shared_ptr<PreconditionFuture::State> future_;
  mutable Mutex mu_;
  CondVar used_changed_;
  bool used_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // no use begins any more
  std::shared_ptr<Host> host_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
