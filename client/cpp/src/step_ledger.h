// SPDX-License-Identifier: Apache-2.0
// How far a worker may go, in which mode, and the reports that it owes the coordinator: what StepControl decides,
// without its thread.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "precondor/client.h"
#include "precondor/v1/session.pb.h"

namespace precondor {

// What a v1::Directive says.
struct WorkerDirective {
  uint64_t lease_through_step = 0;
  std::vector<std::pair<uint64_t, Mode>> modes;  // ascending by first step
  uint64_t rollback_epoch = 0;                   // the last with which the job rolled back, to resume_step; 0: none
  uint64_t resume_step = 0;
  uint64_t snapshot_at = 0;  // see StepDirective
  uint64_t snapshot_id = 0;
  Mode ModeOf(uint64_t step) const;
  // The first step of the run of steps in one mode that has this one.
  uint64_t ModeSince(uint64_t step) const;
  // Factors of steps before it are of no use to `step`: first order began there, and shards may have let go of them.
  // 0: it has not.
  uint64_t LastFirstOrder(uint64_t step) const;
  // Whether the job has gone back, after `epoch`, below what a worker has finished that begins `next_step` next.
  bool LeavesBehind(uint64_t epoch, uint64_t next_step) const;
  static absl::StatusOr<WorkerDirective> Decode(const v1::Directive& directive);
};

struct OwnReport {
  uint64_t step = 0;
  double loss = 0;
  uint64_t samples = 0;
  bool finite = true;
  double learning_rate = 0;
};

// One thread at a time (StepControl's lock).
class StepLedger {
 public:
  struct Owed {
    uint64_t number = 0;  // 1, 2, ... in the order of reports
    OwnReport report;
  };
  // What an answer makes of the report that was owed first.
  enum class Verdict : uint8_t {
    kAskAgain,  // it is still owed
    kAnswered,
    kRefused,  // permanently; it is not sent again
  };

  StepLedger(uint64_t first_step, WorkerDirective directive)
      : directive_(std::move(directive)), next_step_(first_step) {}

  const WorkerDirective& directive() const { return directive_; }
  bool MayStart(uint64_t step) const { return step <= directive_.lease_through_step; }
  // The lowest step not reported yet.
  uint64_t next_step() const { return next_step_; }
  // Leases only grow; answers may overtake each other.
  void Adopt(WorkerDirective directive);

  // The number of the report.
  uint64_t Owe(const OwnReport& report);
  bool owes() const { return !owed_.empty(); }
  const Owed& first_owed() const { return owed_.front(); }
  // Reports up to this number have been answered.
  uint64_t answered() const { return answered_; }
  // The coordinator's answer to the first report owed. Unavailable, DeadlineExceeded and what RecoveryFor says to
  // repeat leave it owed, and so does a lease that does not reach beyond the last step reported: a coordinator that
  // cannot promise more yet, its disk may be full, is asked again.
  Verdict MarkAnswered(const absl::StatusOr<WorkerDirective>& answer);

 private:
  WorkerDirective directive_;
  uint64_t next_step_;
  std::deque<Owed> owed_;
  uint64_t last_number_ = 0;
  uint64_t answered_ = 0;
};

}  // namespace precondor
