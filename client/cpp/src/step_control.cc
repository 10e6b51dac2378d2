// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/step_control.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "client/cpp/src/outbox.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"

namespace precondor {
namespace {

// That a report with lease left waits for a coordinator which has answered so far.
constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kFirstPause = absl::Milliseconds(20);
constexpr absl::Duration kLastPause = absl::Seconds(1);

bool WorthRepeating(const absl::Status& status) {
  const Recovery recovery = RecoveryFor(status);
  return status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kDeadlineExceeded ||
         recovery == Recovery::kRetryLater || recovery == Recovery::kRefreshEpoch;
}

}  // namespace

Mode WorkerDirective::ModeOf(uint64_t step) const {
  Mode mode = Mode::kSecondOrder;
  for (const auto& [first_step, value] : modes) {
    if (first_step <= step) mode = value;
  }
  return mode;
}

absl::StatusOr<WorkerDirective> WorkerDirective::Decode(const v1::Directive& directive) {
  WorkerDirective out;
  out.lease_through_step = directive.lease_through_step();
  out.went_back_epoch = directive.went_back_epoch();
  out.resume_step = directive.resume_step();
  out.snapshot_at = directive.snapshot_at();
  out.snapshot_id = directive.snapshot_id();
  for (const v1::ModeInterval& interval : directive.modes()) {
    PRECONDOR_ASSIGN_OR_RETURN(const Mode mode, wire::DecodeMode(interval.mode(), "mode"));
    out.modes.emplace_back(interval.first_step(), mode);
  }
  return out;
}

StepControl::StepControl(Options options, uint64_t first_step, WorkerDirective directive, Send send)
    : options_(std::move(options)),
      send_(std::move(send)),
      directive_(std::move(directive)),
      next_step_(first_step),
      reporter_([this] { Loop(); }) {}

StepControl::~StepControl() { Stop(); }

void StepControl::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (reporter_.joinable()) reporter_.join();
}

void StepControl::Adopt(WorkerDirective directive) {
  MutexLock lock(mu_);
  AdoptLocked(std::move(directive));
}

void StepControl::AdoptLocked(WorkerDirective directive) {
  if (directive.lease_through_step < directive_.lease_through_step) return;
  directive_ = std::move(directive);
  changed_.notify_all();
}

Mode StepControl::ModeOf(uint64_t step) const {
  MutexLock lock(mu_);
  return directive_.ModeOf(step);
}

uint64_t StepControl::next_step() const {
  MutexLock lock(mu_);
  return next_step_;
}

absl::Status StepControl::LeaseTimeout() const {
  return absl::DeadlineExceededError(
      absl::StrCat(options_.what, " has granted no step beyond ", directive_.lease_through_step, " within ",
                   absl::FormatDuration(options_.lease_timeout),
                   last_failure_.ok() ? "" : absl::StrCat(": ", last_failure_.message())));
}

absl::Status StepControl::AwaitLease(uint64_t step) {
  const absl::Time deadline = absl::Now() + options_.lease_timeout;
  MutexLock lock(mu_);
  changed_.wait_until(mu_, absl::ToChronoTime(deadline), [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return MayStart(step) || owed_.empty() || !failed_.ok() || stopping_;
  });
  PRECONDOR_RETURN_IF_ERROR(failed_);
  if (MayStart(step)) return absl::OkStatus();
  if (!owed_.empty()) return LeaseTimeout();
  return ReasonedStatus(
      absl::StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
      absl::StrCat("the lease ends with step ", directive_.lease_through_step, "; report finished steps first"));
}

absl::Status StepControl::AwaitStart(uint64_t number, uint64_t next_step) {
  const absl::Time now = absl::Now();
  const absl::Time deadline = now + options_.lease_timeout;
  const auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return (answered_ >= number && MayStart(next_step)) || refused_.contains(number) || !failed_.ok() || stopping_;
  };
  if (!away_) changed_.wait_until(mu_, absl::ToChronoTime(std::min(deadline, now + kPatience)), settled);
  if (!settled()) {
    away_ = true;
    changed_.wait_until(mu_, absl::ToChronoTime(deadline),
                        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return settled() || MayStart(next_step); });
  }
  PRECONDOR_RETURN_IF_ERROR(failed_);
  if (const auto refused = refused_.extract(number); !refused.empty()) return refused.mapped();
  if (stopping_) return absl::CancelledError(absl::StrCat(options_.what, ": the worker is gone"));
  return MayStart(next_step) ? absl::OkStatus() : LeaseTimeout();
}

absl::StatusOr<StepDirective> StepControl::Report(const OwnReport& report) {
  MutexLock lock(mu_);
  PRECONDOR_RETURN_IF_ERROR(failed_);
  // That of an earlier report, which was not waited for, is told now.
  PRECONDOR_RETURN_IF_ERROR(std::exchange(late_refusal_, absl::OkStatus()));
  const uint64_t number = ++last_number_;
  owed_.push_back({number, report});
  waiting_.insert(number);
  next_step_ = std::max(next_step_, report.step + 1);
  changed_.notify_all();
  const absl::Status started = AwaitStart(number, report.step + 1);
  waiting_.erase(number);
  PRECONDOR_RETURN_IF_ERROR(started);
  return StepDirective{.lease_through_step = directive_.lease_through_step,
                       .next_mode = directive_.ModeOf(report.step + 1),
                       .snapshot_at = directive_.snapshot_at,
                       .snapshot_id = directive_.snapshot_id};
}

void StepControl::Fail(const absl::Status& status) {
  MutexLock lock(mu_);
  if (failed_.ok()) failed_ = status;
  changed_.notify_all();
}

bool StepControl::TakeAnswer(const Owed& owed, absl::StatusOr<WorkerDirective> answer) {
  changed_.notify_all();
  if (!answer.ok()) {
    last_failure_ = answer.status();
    if (WorthRepeating(answer.status())) return false;
    if (waiting_.contains(owed.number)) {
      refused_.emplace(owed.number, answer.status());
    } else if (late_refusal_.ok()) {
      late_refusal_ = answer.status();
    }
    return true;
  }
  away_ = false;
  last_failure_ = absl::OkStatus();
  answered_ = owed.number;
  AdoptLocked(*std::move(answer));
  // A coordinator that cannot promise more yet, its disk may be full, is asked again.
  return owed_.size() > 1 || MayStart(owed.report.step + 1);
}

void StepControl::Loop() {
  absl::Duration pause = kFirstPause;
  while (true) {
    Owed owed;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !owed_.empty(); });
      if (stopping_) return;
      owed = owed_.front();
    }
    absl::StatusOr<WorkerDirective> answer = send_(owed.report);
    MutexLock lock(mu_);
    if (stopping_ || !failed_.ok()) return;
    if (TakeAnswer(owed, std::move(answer))) {
      owed_.pop_front();
      pause = kFirstPause;
      continue;
    }
    changed_.wait_for(mu_, absl::ToChronoNanoseconds(pause),
                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !failed_.ok(); });
    pause = std::min(pause * 2, kLastPause);
  }
}

}  // namespace precondor
