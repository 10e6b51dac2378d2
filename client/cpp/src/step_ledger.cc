// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/step_ledger.h"

#include <algorithm>

#include "client/cpp/src/outbox.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"

namespace precondor {
namespace {

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

uint64_t WorkerDirective::LastFirstOrder(uint64_t step) const {
  uint64_t last = 0;
  for (const auto& [first_step, value] : modes) {
    if (value == Mode::kFirstOrder && first_step <= step) last = first_step;
  }
  return last;
}

bool WorkerDirective::LeavesBehind(uint64_t epoch, uint64_t next_step) const {
  return rollback_epoch > epoch && resume_step < next_step;
}

absl::StatusOr<WorkerDirective> WorkerDirective::Decode(const v1::Directive& directive) {
  WorkerDirective out;
  out.lease_through_step = directive.lease_through_step();
  out.rollback_epoch = directive.rollback_epoch();
  out.resume_step = directive.resume_step();
  out.snapshot_at = directive.snapshot_at();
  out.snapshot_id = directive.snapshot_id();
  for (const v1::ModeInterval& interval : directive.modes()) {
    PRECONDOR_ASSIGN_OR_RETURN(const Mode mode, wire::DecodeMode(interval.mode(), "mode"));
    out.modes.emplace_back(interval.first_step(), mode);
  }
  return out;
}

void StepLedger::Adopt(WorkerDirective directive) {
  if (directive.lease_through_step >= directive_.lease_through_step) directive_ = std::move(directive);
}

uint64_t StepLedger::QueueReport(const OwnReport& report) {
  owed_.push_back({++last_number_, report});
  next_step_ = std::max(next_step_, report.step + 1);
  return last_number_;
}

StepLedger::Verdict StepLedger::MarkAnswered(const absl::StatusOr<WorkerDirective>& answer) {
  const Owed& owed = owed_.front();
  Verdict verdict = Verdict::kAnswered;
  if (!answer.ok()) {
    verdict = WorthRepeating(answer.status()) ? Verdict::kAskAgain : Verdict::kRefused;
  } else {
    answered_ = owed.number;
    Adopt(*answer);
    if (owed_.size() == 1 && !MayStart(owed.report.step + 1)) verdict = Verdict::kAskAgain;
  }
  if (verdict != Verdict::kAskAgain) owed_.pop_front();
  return verdict;
}

}  // namespace precondor
