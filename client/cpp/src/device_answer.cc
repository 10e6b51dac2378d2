// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/device_answer.h"

#include <utility>

namespace precondor {

std::shared_ptr<DeviceAnswer::Host> DeviceAnswer::host() const {
  MutexLock lock(mu_);
  return host_;
}

absl::Status DeviceAnswer::Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) {
  auto host = std::make_shared<Host>();
  host->values.resize(static_cast<size_t>(out_.size()));
  host->state = std::make_unique<PreconditionFuture::State>(
      what_, MatrixView(host->values.data(), out_.rows, out_.cols), false, false);
  absl::Status status = host->state->Begin(tensors, payload_bytes);
  MutexLock lock(mu_);
  host_ = std::move(host);
  return status;
}

absl::Status DeviceAnswer::Append(uint64_t offset, const wire::ReceivedBytes& chunk) {
  const std::shared_ptr<Host> host = this->host();
  if (host == nullptr) return absl::InvalidArgumentError(what_ + ": result: expected its first bytes, got later ones");
  return host->state->Append(offset, chunk);
}

bool DeviceAnswer::HasAllBytes() const {
  const std::shared_ptr<Host> host = this->host();
  return host != nullptr && host->state->HasAllBytes();
}

void DeviceAnswer::Restart() {
  MutexLock lock(mu_);
  host_ = nullptr;
}

absl::Status DeviceAnswer::WithMemory(absl::FunctionRef<absl::Status()> use) {
  MutexLock lock(memory_mu_);
  if (future_->ready()) return absl::CancelledError(what_ + ": there is an outcome already");
  return use();
}

absl::Status DeviceAnswer::TakeFromSlot(const float* values) {
  MutexLock lock(memory_mu_);
  if (future_->ready()) return absl::OkStatus();
  return plane_->Copy(ConstMatrixView(values, out_.rows, out_.cols), out_);
}

bool DeviceAnswer::Fail(absl::Status status) {
  MutexLock lock(memory_mu_);
  return future_->Fail(std::move(status));
}

bool DeviceAnswer::Complete(Preconditioned outcome) {
  MutexLock lock(memory_mu_);
  if (future_->ready()) return false;
  const std::shared_ptr<Host> host = this->host();
  if (host != nullptr) {
    host->state->Complete(outcome);
    const absl::Status written = plane_->Upload(ConstMatrixView(host->values.data(), out_.rows, out_.cols), out_);
    if (!written.ok()) return future_->Fail(written);
  }
  return future_->Complete(std::move(outcome));
}

}  // namespace precondor
