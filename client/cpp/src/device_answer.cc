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

bool DeviceAnswer::BeginUse() {
  MutexLock lock(mu_);
  used_changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !used_; });
  if (ended_) return false;
  used_ = true;
  return true;
}

void DeviceAnswer::EndUse() {
  MutexLock lock(mu_);
  used_ = false;
  used_changed_.notify_all();
}

void DeviceAnswer::TakeFromSlot(const float* values, size_t outstanding, RegionCopyQueue::Done done) {
  if (!BeginUse()) return done(absl::OkStatus());
  plane_.answers.Post({ConstMatrixView(values, out_.rows, out_.cols), out_}, outstanding,
                      [this, done = std::move(done)](const absl::Status& copied) {
                        EndUse();
                        done(copied);
                      });
}

bool DeviceAnswer::Fail(absl::Status status) {
  if (!BeginLastUse()) return false;
  const bool first = future_->Fail(std::move(status));
  EndUse();
  return first;
}

bool DeviceAnswer::Complete(Preconditioned outcome) {
  if (!BeginLastUse()) return false;
  absl::Status written;
  if (const std::shared_ptr<Host> host = this->host(); host != nullptr) {
    host->state->Complete(outcome);
    written = plane_.plane->Upload(ConstMatrixView(host->values.data(), out_.rows, out_.cols), out_);
  }
  const bool first = written.ok() ? future_->Complete(std::move(outcome)) : future_->Fail(written);
  EndUse();
  return first;
}

bool DeviceAnswer::BeginLastUse() {
  if (!BeginUse()) return false;
  MutexLock lock(mu_);
  ended_ = true;
  return true;
}

}  // namespace precondor
