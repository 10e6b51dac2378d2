// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/step_ledger.h"

#include <algorithm>

#include "client/cpp/src/outbox.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"

namespace precondor {
namespace {

// The last steps of a lease, before which reports are sent so that the lease grows in time.
constexpr uint64_t kStepsAhead = 16;

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
  out.report_limit = std::max<size_t>(directive.report_limit(), 1);
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

std::vector<OwnReport> StepLedger::NextCall() const {
  std::vector<OwnReport> reports;
  const size_t count = std::min(alone_ > 0 ? 1 : report_limit_, owed_.size());
  for (size_t i = 0; i < count; ++i) reports.push_back(owed_[i].report);
  return reports;
}

bool StepLedger::IsDue() const {
  return owed_.size() >= report_limit_ || alone_ > 0 || !MayStart(next_step_ + kStepsAhead);
}

StepLedger::Verdict StepLedger::MarkAnswered(size_t count, const absl::StatusOr<WorkerDirective>& answer) {
  if (answer.ok()) {
    report_limit_ = answer->report_limit;
    Adopt(*answer);
  } else if (WorthRepeating(answer.status())) {
    return Verdict::kAskAgain;
  }
  if (count > 1 && (!answer.ok() || count > report_limit_)) {
    alone_ = count;
    return Verdict::kAskAgain;
  }
  const bool keeps_last = answer.ok() && owed_.size() == count && !MayStart(owed_[count - 1].report.step + 1);
  if (answer.ok()) answered_ = owed_[count - 1].number;
  const size_t settled = keeps_last ? count - 1 : count;
  owed_.erase(owed_.begin(), owed_.begin() + static_cast<std::ptrdiff_t>(settled));
  alone_ -= std::min(alone_, settled);
  if (!answer.ok()) return Verdict::kRefused;
  return keeps_last ? Verdict::kAskAgain : Verdict::kAnswered;
}

}  // namespace precondor
