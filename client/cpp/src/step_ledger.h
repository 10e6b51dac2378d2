// SPDX-License-Identifier: Apache-2.0
// The decisions of StepControl, without its thread: how far a worker may go, in which mode, and which reports it owes
// the coordinator.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "precondor/client.h"
#include "precondor/v1/session.pb.h"

namespace precondor {

// Decoded v1::Directive.
struct WorkerDirective {
  uint64_t lease_through_step = 0;
  std::vector<std::pair<uint64_t, Mode>> modes;  // {first step, mode}, ascending
  uint64_t rollback_epoch = 0;                   // epoch of the job's last rollback, to resume_step; 0 means none
  uint64_t resume_step = 0;
  uint64_t snapshot_at = 0;  // see StepDirective
  uint64_t snapshot_id = 0;
  size_t report_limit = 1;  // reports that one call brings
  Mode ModeOf(uint64_t step) const;
  // Returns the first step of the last first-order run that begins at or before `step`; 0 if there is none.
  uint64_t LastFirstOrder(uint64_t step) const;
  // True if the job has rolled back in an epoch after `epoch` to a step before `next_step`, so that a worker whose next
  // step is `next_step` has finished steps that are undone.
  bool LeavesBehind(uint64_t epoch, uint64_t next_step) const;
  static absl::StatusOr<WorkerDirective> Decode(const v1::Directive& directive);
};

// A worker's report of one finished step.
struct OwnReport {
  uint64_t step = 0;
  double loss = 0;
  uint64_t samples = 0;
  bool finite = true;
  double learning_rate = 0;
  absl::Time finished = {};  // by MonotonicNow
};

// Keeps the lease and the reports that are owed. Not thread-safe: StepControl's lock guards it.
class StepLedger {
 public:
  struct Owed {
    uint64_t number = 0;  // 1, 2, ... in the order of reports
    OwnReport report;
  };
  // Result of an answer to the first reports owed.
  enum class Verdict : uint8_t {
    kAskAgain,  // they are still owed
    kAnswered,
    kRefused,  // the first one, permanently; it is not sent again
  };

  StepLedger(uint64_t first_step, WorkerDirective directive)
      : directive_(std::move(directive)), next_step_(first_step), report_limit_(directive_.report_limit) {}

  const WorkerDirective& directive() const { return directive_; }
  bool MayStart(uint64_t step) const { return step <= directive_.lease_through_step; }
  // The lowest step that has not been reported.
  uint64_t next_step() const { return next_step_; }
  // Adopts a directive unless its lease ends earlier than the current one, because answers may arrive out of order.
  void Adopt(WorkerDirective directive);

  // Adds a report and returns its number.
  uint64_t QueueReport(const OwnReport& report);
  bool owes() const { return !owed_.empty(); }
  const Owed& first_owed() const { return owed_.front(); }
  // Returns the reports of the next call: the first ones owed, as many as the coordinator takes.
  std::vector<OwnReport> NextCall() const;
  // Returns whether more reports do not fit into the next call, or the lease will soon be used up.
  bool IsDue() const;
  // The highest number of an answered report.
  uint64_t answered() const { return answered_; }
  // Handles the coordinator's answer to the first `count` reports owed. They stay owed after UNAVAILABLE,
  // DEADLINE_EXCEEDED and errors that RecoveryFor says to retry; the last one if the lease does not reach beyond it: a
  // coordinator that cannot extend the lease now (its disk may be full) is asked again. After another error of several,
  // or if the coordinator takes fewer (an older release has replaced it), each is sent by itself.
  Verdict MarkAnswered(size_t count, const absl::StatusOr<WorkerDirective>& answer);

 private:
  WorkerDirective directive_;
  uint64_t next_step_;
  std::deque<Owed> owed_;
  size_t report_limit_;
  size_t alone_ = 0;  // reports that are sent by themselves
  uint64_t last_number_ = 0;
  uint64_t answered_ = 0;
};

}  // namespace precondor
