// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/result_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"

#include "kernels/base/clock.h"

namespace precondor {
namespace {

#ifdef ABSL_IS_LITTLE_ENDIAN
constexpr bool kLittleEndian = true;
#else
constexpr bool kLittleEndian = false;
#endif

}  // namespace

PreconditionFuture::State::State(std::string what, MatrixView out, bool payload_borrowed, bool out_aliases_gradient,
                                 std::shared_ptr<HeldSender> held)
    : what_(std::move(what)),
      out_(out),
      hold_(out_aliases_gradient),
      held_gradients_(std::move(held)),
      borrowed_(payload_borrowed) {}

absl::Status PreconditionFuture::State::Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) {
  MutexLock lock(mu_);
  const size_t expected_tensors = out_.size() > 0 ? 1 : 0;  // SHARDED: the rank may have no part
  if (tensors.size() != expected_tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(what_, ": result: expected ", expected_tensors, " tensors, got ", tensors.size()));
  }
  if (tensors.empty()) {
    begun_ = true;
    return absl::OkStatus();
  }
  const wire::TensorFormat& format = tensors.front();
  if (format.dims != std::vector<int64_t>{out_.rows, out_.cols}) {
    return absl::InvalidArgumentError(absl::StrCat(what_, ": result: expected a tensor [", out_.rows, ", ", out_.cols,
                                                   "], got [", absl::StrJoin(format.dims, ", "), "]"));
  }
  const uint64_t expected = static_cast<uint64_t>(out_.size()) * ByteSize(format.dtype);
  if (payload_bytes != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(what_, ": result: expected ", expected, " bytes, got ", payload_bytes));
  }
  begun_ = true;
  dtype_ = format.dtype;
  scale_ = format.scale;
  return absl::OkStatus();
}

absl::Status PreconditionFuture::State::Append(uint64_t offset, const wire::ReceivedBytes& chunk) {
  MutexLock lock(mu_);
  // The rest of an answer that began before its time-out. The contribution that was sent again gets a whole one.
  if (outcome_.has_value() || (!begun_ && offset > 0)) return absl::OkStatus();
  const uint64_t total = static_cast<uint64_t>(out_.size()) * ByteSize(dtype_);
  if (!begun_ || offset != received_ || chunk.size() > total - received_) {
    return absl::InvalidArgumentError(absl::StrCat(what_, ": result: expected bytes from ", received_, " to at most ",
                                                   total, ", got ", chunk.size(), " from ", offset));
  }
  received_ += chunk.size();
  if (hold_) {
    held_.push_back(chunk.Owned());
  } else {
    Write(chunk);
  }
  return absl::OkStatus();
}

bool PreconditionFuture::State::HasAllBytes() const {
  MutexLock lock(mu_);
  return begun_ && received_ == static_cast<uint64_t>(out_.size()) * ByteSize(dtype_);
}

void PreconditionFuture::State::Restart() {
  MutexLock lock(mu_);
  if (outcome_.has_value()) return;
  begun_ = false;
  received_ = cursor_ = carry_size_ = 0;
  held_.clear();
}

bool PreconditionFuture::State::Complete(Preconditioned outcome) {
  return Change([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (outcome_.has_value()) return false;
    if (!held_.empty()) {
      written_ = false;
      if (!borrowed_) WriteHeld();
    }
    outcome_ = std::move(outcome);
    return true;
  });
}

bool PreconditionFuture::State::Fail(absl::Status status) {
  return Change([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (outcome_.has_value()) return false;
    held_.clear();
    outcome_ = std::move(status);
    return true;
  });
}

void PreconditionFuture::State::OnPayloadReleased() {
  Change([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    borrowed_ = false;
    if (!written_) WriteHeld();
    return true;
  });
}

// Runs `change` under the lock. Notifies waiters without the lock, and only if they have nothing more to wait for.
bool PreconditionFuture::State::Change(absl::FunctionRef<bool()> change) {
  bool changed = false, ready = false;
  {
    MutexLock lock(mu_);
    changed = change();
    ready = ReadyLocked();
  }
  if (changed && ready) changed_.notify_all();
  return changed;
}

void PreconditionFuture::State::WriteHeld() {
  for (const wire::ReceivedBytes& chunk : held_) Write(chunk);
  held_.clear();
  written_ = true;
}

void PreconditionFuture::State::Write(const wire::ReceivedBytes& chunk) {
  const bool plain = dtype_ == DType::kF32 && scale_ == 1.0f && kLittleEndian;
  for (const absl::string_view piece : chunk.pieces()) {
    if (plain) {
      WriteBytes(piece.data(), piece.size());
    } else {
      WriteElements(piece.data(), piece.size());
    }
  }
}

// Copies bytes that need no conversion into the rows.
void PreconditionFuture::State::WriteBytes(const char* data, uint64_t size) {
  const uint64_t row_bytes =
      out_.contiguous() ? static_cast<uint64_t>(out_.size()) * 4 : static_cast<uint64_t>(out_.cols) * 4;
  while (size > 0) {
    const uint64_t row = cursor_ / row_bytes;
    const uint64_t within = cursor_ % row_bytes;
    const uint64_t count = std::min(size, row_bytes - within);
    std::memcpy(reinterpret_cast<char*>(out_.row(static_cast<int64_t>(row))) + within, data, count);
    data += count;
    size -= count;
    cursor_ += count;
  }
}

// Converts elements, in runs that end at a row's end at the latest.
void PreconditionFuture::State::WriteElements(const char* data, uint64_t size) {
  const uint64_t element = ByteSize(dtype_);
  while (size > 0) {
    const int64_t index = static_cast<int64_t>(cursor_ / element);
    const int64_t row = index / out_.cols;
    const int64_t col = index % out_.cols;
    float* to = out_.row(row) + col;
    if (carry_size_ > 0 || size < element) {
      const uint64_t count = std::min(size, element - carry_size_);
      std::memcpy(carry_ + carry_size_, data, count);
      carry_size_ += count;
      data += count;
      size -= count;
      if (carry_size_ < element) return;
      DecodeElements(dtype_, carry_, scale_, absl::MakeSpan(to, 1));
      carry_size_ = 0;
      cursor_ += element;
      continue;
    }
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(size / element), out_.cols - col);
    DecodeElements(dtype_, data, scale_, absl::MakeSpan(to, static_cast<size_t>(count)));
    data += count * element;
    size -= count * element;
    cursor_ += count * element;
  }
}

bool PreconditionFuture::State::ready() const {
  MutexLock lock(mu_);
  return ReadyLocked();
}

bool PreconditionFuture::State::Ask() const {
  if (ready()) return true;
  if (held_gradients_ != nullptr) held_gradients_->Send();
  return ready();
}

bool PreconditionFuture::State::WaitFor(absl::Duration timeout) const {
  if (Ask()) return true;
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(mu_);
  return changed_.wait_until(mu_, SteadyTime(deadline),
                             [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ReadyLocked(); });
}

// Waits without a deadline: the link or the send queue fails the contribution at its deadline, and the worker's
// destructor fails the rest.
absl::StatusOr<Preconditioned> PreconditionFuture::State::Wait() {
  Ask();
  std::function<std::string()> explain;
  {
    MutexLock lock(mu_);
    changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ReadyLocked() && !explaining_; });
    if (!absl::IsDeadlineExceeded(outcome_->status()) || explain_late_ == nullptr) return *outcome_;
    explain = std::exchange(explain_late_, nullptr);
    explaining_ = true;
  }
  const std::string why = explain();
  absl::Status late;
  Change([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    explaining_ = false;
    late = absl::DeadlineExceededError(absl::StrCat(outcome_->status().message(), why));
    outcome_ = late;
    return true;
  });
  return late;
}

void PreconditionFuture::State::ExplainLateWith(std::function<std::string()> explain) {
  MutexLock lock(mu_);
  explain_late_ = std::move(explain);
}

bool PreconditionFuture::ready() const { return state_ != nullptr && state_->Ask(); }

bool PreconditionFuture::WaitFor(absl::Duration timeout) const { return state_ != nullptr && state_->WaitFor(timeout); }

absl::StatusOr<Preconditioned> PreconditionFuture::Wait() const {
  if (state_ == nullptr) return absl::FailedPreconditionError("PreconditionFuture: no gradient was submitted");
  return state_->Wait();
}

}  // namespace precondor
