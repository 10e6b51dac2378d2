// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/step_control.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// How long a report waits for its answer if the lease allows the next step and the coordinator has answered so far.
constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kFirstPause = absl::Milliseconds(20);
constexpr absl::Duration kLastPause = absl::Seconds(1);
// Between two calls if nothing is due. A call takes .4 ms of both processes' processor time.
constexpr absl::Duration kBetweenCalls = absl::Milliseconds(20);

}  // namespace

struct ReportFuture::Handle {
  Handle(std::weak_ptr<StepControl> of, uint64_t report, absl::Status status)
      : control(std::move(of)), number(report), error(std::move(status)) {}
  ~Handle() {
    if (const auto still = control.lock()) still->Forget(number);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const std::weak_ptr<StepControl> control;
  const uint64_t number;
  const absl::Status error;  // not OK: there is no report
};

StepControl::StepControl(Options options, uint64_t first_step, WorkerDirective directive, Send send)
    : options_(std::move(options)),
      send_(std::move(send)),
      ledger_(first_step, std::move(directive)),
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
  ledger_.Adopt(std::move(directive));
  changed_.notify_all();
}

Mode StepControl::ModeOf(uint64_t step) const {
  MutexLock lock(mu_);
  return ledger_.directive().ModeOf(step);
}

uint64_t StepControl::LastFirstOrder() const {
  MutexLock lock(mu_);
  return ledger_.directive().LastFirstOrder(ledger_.next_step());
}

uint64_t StepControl::next_step() const {
  MutexLock lock(mu_);
  return ledger_.next_step();
}

absl::Status StepControl::LeaseTimeout() const {
  return absl::DeadlineExceededError(
      absl::StrCat(options_.what, " has granted no step beyond ", ledger_.directive().lease_through_step, " within ",
                   absl::FormatDuration(options_.lease_timeout),
                   last_failure_.ok() ? "" : absl::StrCat(": ", last_failure_.message())));
}

template <typename Condition>
bool StepControl::WaitUntil(absl::Time until, const Condition& condition) {
  if (condition()) return true;
  if (MonotonicNow() >= until) return false;
  ++callers_waiting_;
  changed_.notify_all();
  const bool met = changed_.wait_until(mu_, SteadyTime(until), condition);
  --callers_waiting_;
  return met;
}

absl::Status StepControl::AwaitLease(uint64_t step) {
  const absl::Time deadline = MonotonicNow() + options_.lease_timeout;
  MutexLock lock(mu_);
  WaitUntil(deadline, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return ledger_.MayStart(step) || !ledger_.owes() || !failed_.ok() || stopping_;
  });
  PRECONDOR_RETURN_IF_ERROR(failed_);
  if (ledger_.MayStart(step)) return absl::OkStatus();
  if (ledger_.owes()) return LeaseTimeout();
  return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStepTooFarAhead,
                        absl::StrCat("the lease ends with step ", ledger_.directive().lease_through_step,
                                     "; report finished steps first"));
}

ReportFuture StepControl::Begin(const OwnReport& report) {
  const absl::Time now = MonotonicNow();
  MutexLock lock(mu_);
  absl::Status error = failed_;
  // The refusal of an earlier report for which no call waited.
  if (error.ok()) error = std::exchange(late_refusal_, absl::OkStatus());
  if (!error.ok()) return ReportFuture(std::make_shared<ReportFuture::Handle>(weak_from_this(), 0, std::move(error)));
  const bool is_first = !ledger_.owes();
  const uint64_t number = ledger_.QueueReport(report);
  waiting_[number] = {
      .next_step = report.step + 1, .patient_until = now + kPatience, .deadline = now + options_.lease_timeout};
  if (is_first || ledger_.IsDue()) changed_.notify_all();
  return ReportFuture(std::make_shared<ReportFuture::Handle>(weak_from_this(), number, absl::OkStatus()));
}

bool StepControl::IsSettled(uint64_t number, const Waiting& report) const {
  if (refused_.contains(number) || !failed_.ok() || stopping_) return true;
  const absl::Time now = MonotonicNow();
  if (now >= report.deadline) return true;
  return ledger_.MayStart(report.next_step) &&
         (ledger_.answered() >= number || coordinator_unreachable_ || now >= report.patient_until);
}

bool StepControl::AwaitSettled(uint64_t number, absl::Time until) {
  const auto report = waiting_.find(number);
  if (report == waiting_.end()) return true;
  const Waiting waiting = report->second;
  const auto settled = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return IsSettled(number, waiting); };
  WaitUntil(std::min({until, waiting.patient_until, waiting.deadline}), settled);
  const bool answered = ledger_.answered() >= number || refused_.contains(number) || !failed_.ok();
  if (!answered && MonotonicNow() >= waiting.patient_until) coordinator_unreachable_ = true;
  return WaitUntil(std::min(until, waiting.deadline), settled);
}

bool StepControl::WaitFor(uint64_t number, absl::Duration timeout) {
  const absl::Time until = MonotonicNow() + timeout;
  MutexLock lock(mu_);
  return AwaitSettled(number, until);
}

absl::StatusOr<StepDirective> StepControl::Wait(uint64_t number) {
  MutexLock lock(mu_);
  AwaitSettled(number, absl::InfiniteFuture());
  const auto waited = waiting_.extract(number);
  PRECONDOR_RETURN_IF_ERROR(failed_);
  if (const auto refused = refused_.extract(number); !refused.empty()) return refused.mapped();
  if (stopping_) return absl::CancelledError(absl::StrCat(options_.what, ": the worker is gone"));
  if (waited.empty()) return absl::FailedPreconditionError(absl::StrCat(options_.what, ": the report was waited for"));
  const uint64_t next_step = waited.mapped().next_step;
  if (!ledger_.MayStart(next_step)) return LeaseTimeout();
  return StepDirective{.lease_through_step = ledger_.directive().lease_through_step,
                       .next_mode = ledger_.directive().ModeOf(next_step),
                       .snapshot_at = ledger_.directive().snapshot_at,
                       .snapshot_id = ledger_.directive().snapshot_id};
}

void StepControl::Forget(uint64_t number) {
  MutexLock lock(mu_);
  waiting_.erase(number);
  if (auto refused = refused_.extract(number); !refused.empty() && late_refusal_.ok()) {
    late_refusal_ = std::move(refused.mapped());
  }
}

void StepControl::Fail(const absl::Status& status) {
  MutexLock lock(mu_);
  if (failed_.ok()) failed_ = status;
  changed_.notify_all();
}

bool StepControl::TakeAnswer(size_t count, const absl::StatusOr<WorkerDirective>& answer) {
  const uint64_t number = ledger_.first_owed().number;
  const StepLedger::Verdict verdict = ledger_.MarkAnswered(count, answer);
  changed_.notify_all();
  last_failure_ = answer.status();
  if (answer.ok()) coordinator_unreachable_ = false;
  if (verdict == StepLedger::Verdict::kRefused) {
    if (waiting_.contains(number)) {
      refused_.emplace(number, answer.status());
    } else if (late_refusal_.ok()) {
      late_refusal_ = answer.status();
    }
  }
  return verdict != StepLedger::Verdict::kAskAgain;
}

void StepControl::Loop() {
  NameThisThread("precondor-steps");
  absl::Duration pause = kFirstPause;
  absl::Time next_call = MonotonicNow();
  while (true) {
    std::vector<OwnReport> reports;
    {
      MutexLock lock(mu_);
      changed_.wait(mu_, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || ledger_.owes(); });
      changed_.wait_until(mu_, SteadyTime(next_call), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        return stopping_ || callers_waiting_ > 0 || ledger_.IsDue();
      });
      if (stopping_) return;
      reports = ledger_.NextCall();
    }
    next_call = MonotonicNow() + kBetweenCalls;
    const absl::StatusOr<WorkerDirective> answer = send_(reports);
    MutexLock lock(mu_);
    if (stopping_ || !failed_.ok()) return;
    if (TakeAnswer(reports.size(), answer)) {
      pause = kFirstPause;
      continue;
    }
    changed_.wait_for(mu_, absl::ToChronoNanoseconds(pause),
                      [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !failed_.ok(); });
    pause = std::min(pause * 2, kLastPause);
  }
}

bool ReportFuture::WaitFor(absl::Duration timeout) const {
  const std::shared_ptr<StepControl> control = handle_->control.lock();
  return control == nullptr || !handle_->error.ok() || control->WaitFor(handle_->number, timeout);
}

absl::StatusOr<StepDirective> ReportFuture::Wait() const {
  PRECONDOR_RETURN_IF_ERROR(handle_->error);
  const std::shared_ptr<StepControl> control = handle_->control.lock();
  if (control == nullptr) return absl::CancelledError("the worker is gone");
  return control->Wait(handle_->number);
}

}  // namespace precondor
