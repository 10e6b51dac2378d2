// SPDX-License-Identifier: Apache-2.0
// Shared state of a PreconditionFuture: receives the result, writes it to the caller's memory, and tells when the
// caller may use that memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/cpp/src/contribution.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"

namespace precondor {

// Thread-safe. Another rank may wait for a gradient that is held back, so every call that waits calls Send first.
class HeldSender {
 public:
  explicit HeldSender(std::function<void()> send) : send_(std::move(send)) {}

  // Records that something is held back.
  void NoteHeld() { holds_ = true; }
  // Sends it, if there is anything.
  void Send() {
    if (!holds_.exchange(false)) return;
    MutexLock lock(mu_);
    if (send_ != nullptr) send_();
  }
  // After this, Send does nothing.
  void Stop() {
    MutexLock lock(mu_);
    send_ = nullptr;
  }

 private:
  std::atomic<bool> holds_ = false;
  Mutex mu_;
  std::function<void()> send_ ABSL_GUARDED_BY(mu_);
};

// One gradient's answer. Invariants: `out` is written only between Begin and Complete, and never after ready(). ready()
// requires an outcome, and that no thread reads the gradient's memory. Chunks arrive in order; after a lost stream they
// start again (Restart). If `out` is the gradient's own memory, chunks are kept in gRPC's buffers and written together
// at the end, because a gradient that may be sent again must not be half overwritten. Thread-safe; calls no other code
// but `explain`, without its lock.
class PreconditionFuture::State final : public AnswerSink {
 public:
  // With `payload_borrowed` gRPC reads the gradient in the caller's memory until OnPayloadReleased.
  // WaitFor, Wait and Ask call `held` (null: nothing is held back).
  State(std::string what, MatrixView out, bool payload_borrowed, bool out_aliases_gradient,
        std::shared_ptr<HeldSender> held = nullptr);

  // Returns INVALID_ARGUMENT unless there is one tensor, of the shape and size of `out`.
  absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) override;
  absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) override;
  bool HasAllBytes() const override;
  void Restart() override;

  bool Complete(Preconditioned outcome) override;
  bool Fail(absl::Status status) override;
  void OnPayloadReleased();

  // `explain` returns what is added to the message of DEADLINE_EXCEEDED; Wait calls it, once.
  void ExplainLateWith(std::function<std::string()> explain);

  bool ready() const override;
  // The caller asks for the answer. Sends what is held back, unless the answer is ready.
  bool Ask() const;
  bool WaitFor(absl::Duration timeout) const;
  absl::StatusOr<Preconditioned> Wait();

 private:
  bool ReadyLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return outcome_.has_value() && !borrowed_ && written_; }
  void Write(const wire::ReceivedBytes& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteBytes(const char* data, uint64_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteElements(const char* data, uint64_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WriteHeld() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Change(absl::FunctionRef<bool()> change) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string what_;
  const MatrixView out_;
  const bool hold_;  // keep chunks until the end: out is the gradient's own memory
  const std::shared_ptr<HeldSender> held_gradients_;

  mutable Mutex mu_;
  mutable CondVar changed_;
  std::optional<absl::StatusOr<Preconditioned>> outcome_ ABSL_GUARDED_BY(mu_);
  std::function<std::string()> explain_late_ ABSL_GUARDED_BY(mu_);
  bool explaining_ ABSL_GUARDED_BY(mu_) = false;  // while explain_late_ runs
  bool borrowed_ ABSL_GUARDED_BY(mu_);
  bool written_ ABSL_GUARDED_BY(mu_) = true;  // false while held chunks wait for the gradient's release
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
  DType dtype_ ABSL_GUARDED_BY(mu_) = DType::kF32;
  float scale_ ABSL_GUARDED_BY(mu_) = 1.0f;
  uint64_t received_ ABSL_GUARDED_BY(mu_) = 0;  // bytes received, written or held
  uint64_t cursor_ ABSL_GUARDED_BY(mu_) = 0;    // bytes written to out
  std::vector<wire::ReceivedBytes> held_ ABSL_GUARDED_BY(mu_);
  uint8_t carry_[4] ABSL_GUARDED_BY(mu_) = {};  // an element cut in two by a chunk or slice boundary
  uint64_t carry_size_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
