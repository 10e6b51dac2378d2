// SPDX-License-Identifier: Apache-2.0
// A worker's threads: the timer of its links, and the refresher, which joins again when the epoch changes.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/worker.h"
#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Longest delay until a passed deadline is noticed.
constexpr absl::Duration kTick = absl::Milliseconds(200);

}  // namespace

void WorkerImpl::TimerLoop() {
  NameThisThread("precondor-timer");
  while (true) {
    const absl::Time now = MonotonicNow();
    absl::Time next = std::min(now + kTick, send_queue_.Tick(now));
    for (const ShardRoutes::Link& link : routes_.links()) next = std::min(next, link->Tick(now));
    MutexLock lock(mu_);
    changed_.wait_until(mu_, SteadyTime(next),
                        [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || wake_; });
    if (stopping_) return;
    wake_ = false;
  }
}

void WorkerImpl::RefreshLoop() {
  NameThisThread("precondor-join");
  while (true) {
    bool refresh = false;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || refresh_ || ask_; });
      if (stopping_) return;
      refresh = refresh_;
      ask_ = false;
    }
    if (!refresh) {
      AskForEpoch();
      continue;
    }
    const absl::Status status = Refresh();
    if (status.ok()) continue;
    Fail(status);
    return;
  }
}

v1::JoinSessionRequest WorkerImpl::JoinRequest() const {
  v1::JoinSessionRequest request;
  request.set_name(session_);
  request.set_rank(rank_);
  request.set_incarnation(incarnation_);
  request.set_first_step(steps_->next_step());
  request.set_secret(secret_);
  return request;
}

absl::StatusOr<v1::JoinSessionResponse> WorkerImpl::JoinAgain() {
  const absl::Time deadline = MonotonicNow() + options_.lease_timeout;
  while (true) {
    const absl::Time begun = MonotonicNow();
    absl::StatusOr<v1::JoinSessionResponse> joined =
        JoinUntilActive(*control_, JoinRequest(), options_.join_timeout, canceller_);
    // Waits for an unreachable coordinator, but not for missing ranks beyond join_timeout.
    const bool gone = joined.status().code() == absl::StatusCode::kUnavailable ||
                      (joined.status().code() == absl::StatusCode::kDeadlineExceeded &&
                       MonotonicNow() - begun < options_.join_timeout);
    if (!gone || MonotonicNow() >= deadline || !canceller_.Pause(kTick)) return joined;
  }
}

void WorkerImpl::AskForEpoch() {
  const uint64_t have = epoch();
  const auto joined = control_->Call<v1::JoinSessionResponse>(JoinRequest(), canceller_);
  if (joined.ok() && joined->session_id() != session_id_) {
    Fail(
        ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                       absl::StrCat("session ", session_, ": expected session_id ", session_id_,
                                    ", which has been closed; there is another of this name, ", joined->session_id())));
    return;
  }
  if (joined.ok() && joined->epoch() != have) OnStaleEpoch(have);
  // If the coordinator is unreachable or waits for a shard, the timer asks again. PERMISSION_DENIED means that another
  // session has this name now.
  const bool denied = absl::IsPermissionDenied(joined.status());
  if (denied || (!joined.ok() && RecoveryFor(joined.status()) == Recovery::kFatal)) Fail(joined.status());
}

absl::Status WorkerImpl::Refresh() {
  PRECONDOR_ASSIGN_OR_RETURN(const v1::JoinSessionResponse joined, JoinAgain());
  PRECONDOR_ASSIGN_OR_RETURN(WorkerDirective directive, WorkerDirective::Decode(joined.directive()));
  // Answers to an unfinished step also prevent this rank from beginning earlier.
  const std::optional<uint64_t> answered = routes_.answered_through();
  const uint64_t next_step = std::max(steps_->next_step(), answered.has_value() ? *answered + 1 : 0);
  PRECONDOR_RETURN_IF_ERROR(CheckResume(directive, epoch(), next_step));
  steps_->Adopt(std::move(directive));
  {
    MutexLock lock(mu_);
    refresh_ = false;
    epoch_ = joined.epoch();
    changed_.notify_all();
  }
  return routes_.Change(joined.shard_map(), joined.epoch());
}

bool WorkerImpl::AwaitEpochAfter(uint64_t stale) {
  MutexLock lock(mu_);
  changed_.wait_for(mu_, absl::ToChronoNanoseconds(options_.rpc_timeout),
                    [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || epoch_ != stale || !failed_.ok(); });
  return epoch_ != stale && failed_.ok();
}

}  // namespace precondor
