// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/device_send_queue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/thread_name.h"
#include "kernels/cuda/cuda_module.h"

namespace precondor {
namespace {

// Shortest and longest pause between two checks of a stream.
constexpr absl::Duration kFirstLook = absl::Microseconds(10);
constexpr absl::Duration kLastLook = absl::Microseconds(200);

}  // namespace

absl::StatusOr<std::shared_ptr<DevicePlane>> DeviceSendQueue::PlaneOf(int device) {
  MutexLock lock(mu_);
  const auto found = planes_.find(device);
  if (found != planes_.end()) return found->second;
  return planes_.emplace(device, LoadCudaPlane(device)).first->second;
}

void DeviceSendQueue::Post(std::shared_ptr<const PendingSend> pending) {
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
    if (current_ != nullptr && current_->deadline > now) next = std::min(next, current_->deadline);
    if (current_ != nullptr && current_->deadline <= now) late.push_back(current_);
    if (!late.empty()) changed_.notify_all();
  }
  for (const Item& item : late) item->answer->Fail(LateError(*item));
  return next;
}

void DeviceSendQueue::Fail(const absl::Status& status) {
  std::deque<Item> failing;
  {
    MutexLock lock(mu_);
    if (failed_.ok()) failed_ = status;
    failing.swap(queue_);
    if (current_ != nullptr) failing.push_front(current_);
    changed_.notify_all();
  }
  for (const Item& item : failing) item->answer->Fail(status);
}

bool DeviceSendQueue::WaitIdle(absl::Time deadline) {
  MutexLock lock(mu_);
  return changed_.wait_until(mu_, SteadyTime(deadline), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return queue_.empty() && current_ == nullptr;
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
    Item pending;
    Item done;  // freed after the lock is released
    {
      MutexLock lock(mu_);
      done = std::exchange(current_, nullptr);
      changed_.notify_all();
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      pending = current_ = std::move(queue_.front());
      queue_.pop_front();
    }
    done = nullptr;
    const absl::Status status = AwaitMarks(*pending);
    if (!status.ok()) {
      pending->answer->Fail(status);
    } else if (!pending->answer->ready()) {
      pending->deliver();
    }
  }
}

absl::Status DeviceSendQueue::AwaitMarks(const PendingSend& pending) {
  absl::Duration pause = kFirstLook;
  for (const auto& mark : pending.marks) {
    while (true) {
      PRECONDOR_ASSIGN_OR_RETURN(const bool reached, pending.plane->Reached(*mark));
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
