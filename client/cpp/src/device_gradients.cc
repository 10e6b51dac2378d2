// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/device_gradients.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "kernels/cuda/cuda_module.h"

namespace precondor {
namespace {

// Shortest and longest pause between two checks of a stream.
constexpr absl::Duration kFirstLook = absl::Microseconds(10);
constexpr absl::Duration kLastLook = absl::Microseconds(200);

}  // namespace

absl::StatusOr<WorkerPlane*> PlaneTable::Of(int device) {
  MutexLock lock(mu_);
  auto found = planes_.find(device);
  if (found == planes_.end()) {
    absl::StatusOr<std::unique_ptr<WorkerPlane>> made = nullptr;
    absl::StatusOr<std::unique_ptr<DevicePlane>> plane = LoadCudaPlane(device);
    if (plane.ok()) {
      made = std::make_unique<WorkerPlane>(*std::move(plane));
    } else {
      made = plane.status();
    }
    found = planes_.emplace(device, std::move(made)).first;
  }
  if (!found->second.ok()) return found->second.status();
  return found->second->get();
}

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

void DeviceSendQueue::Post(Item pending) {
  absl::Status failed;
  {
    MutexLock lock(mu_);
    failed = failed_;
    if (failed.ok()) {
      queue_.push_back(std::move(pending));
      if (!thread_.joinable()) thread_ = std::thread([this] { Loop(); });
      changed_.notify_all();
      return;
    }
  }
  pending->answer->Fail(failed);
}

absl::Time DeviceSendQueue::Tick(absl::Time now) {
  std::vector<Item> late;
  absl::Time next = absl::InfiniteFuture();
  {
    MutexLock lock(mu_);
    std::deque<Item> left;
    for (Item& item : queue_) {
      if (item->deadline > now) next = std::min(next, item->deadline);
      (item->deadline > now ? left.emplace_back() : late.emplace_back()) = std::move(item);
    }
    queue_ = std::move(left);
    for (const Item& item : current_) {
      if (item->deadline > now) next = std::min(next, item->deadline);
      if (item->deadline <= now) late.push_back(item);
    }
    if (!late.empty()) changed_.notify_all();
  }
  for (const Item& item : late) item->answer->Fail(LateError(*item));
  return next;
}

void DeviceSendQueue::Fail(const absl::Status& status) {
  std::vector<Item> failing;
  {
    MutexLock lock(mu_);
    if (failed_.ok()) failed_ = status;
    failing = current_;
    failing.insert(failing.end(), queue_.begin(), queue_.end());
    queue_.clear();
    changed_.notify_all();
  }
  for (const Item& item : failing) item->answer->Fail(status);
}

bool DeviceSendQueue::WaitIdle(absl::Time deadline) {
  MutexLock lock(mu_);
  return changed_.wait_until(mu_, SteadyTime(deadline), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return queue_.empty() && current_.empty();
  });
}

void DeviceSendQueue::Stop() {
  Fail(absl::CancelledError("the worker was destroyed"));
  std::thread ending;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
    ending = std::move(thread_);
  }
  if (ending.joinable()) ending.join();
}

void DeviceSendQueue::Loop() {
  NameThisThread("precondor-send");
  while (true) {
    std::vector<Item> sends;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopping_ || !queue_.empty() || !current_.empty();
      });
      changed_.wait_until(mu_, SteadyTime(MonotonicNow() + patience_), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopping_ || !failed_.ok() || current_.size() + queue_.size() >= outstanding_;
      });
      current_.insert(current_.end(), queue_.begin(), queue_.end());
      queue_.clear();
      if (current_.empty()) {
        if (stopping_) return;
        continue;  // all were late
      }
      sends = current_;
    }
    const std::vector<Item> done = AwaitFirst(std::move(sends));  // freed after the lock is released
    std::vector<Item> computed;
    std::copy_if(done.begin(), done.end(), std::back_inserter(computed),
                 [](const Item& item) { return !item->answer->ready(); });
    if (!computed.empty()) deliver_(computed);
    MutexLock lock(mu_);
    current_.erase(current_.begin(), current_.begin() + static_cast<std::ptrdiff_t>(done.size()));
    changed_.notify_all();
  }
}

std::vector<DeviceSendQueue::Item> DeviceSendQueue::AwaitFirst(std::vector<Item> sends) {
  const PendingSend& first = *sends.front();
  const absl::Status status = AwaitMarks(first);
  if (!status.ok()) first.answer->Fail(status);
  size_t count = 1;
  while (status.ok() && count < sends.size() && sends[count]->plane == first.plane && IsComputed(*sends[count])) {
    if (MonotonicNow() >= sends[count]->deadline) sends[count]->answer->Fail(LateError(*sends[count]));
    ++count;
  }
  sends.resize(count);
  return sends;
}

bool DeviceSendQueue::IsComputed(const PendingSend& pending) {
  return std::all_of(pending.marks.begin(), pending.marks.end(),
                     [&](const auto& mark) { return pending.plane->plane->Reached(*mark).value_or(false); });
}

absl::Status DeviceSendQueue::AwaitMarks(const PendingSend& pending) {
  absl::Duration pause = kFirstLook;
  for (const auto& mark : pending.marks) {
    while (true) {
      PRECONDOR_ASSIGN_OR_RETURN(const bool reached, pending.plane->plane->Reached(*mark));
      if (MonotonicNow() >= pending.deadline) return LateError(pending);
      if (reached) break;
      MutexLock lock(mu_);
      PRECONDOR_RETURN_IF_ERROR(failed_);
      changed_.wait_for(mu_, absl::ToChronoNanoseconds(pause));
      pause = std::min(2 * pause, kLastLook);
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceSendQueue::LateError(const PendingSend& pending) {
  return absl::DeadlineExceededError(
      absl::StrCat(pending.what, ": gradient in device memory not computed and handed over within result_timeout"));
}

}  // namespace precondor
