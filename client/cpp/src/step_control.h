// SPDX-License-Identifier: Apache-2.0
// How far a worker may go and in which mode, and the reports that it owes the coordinator.
//
// A report is sent by a thread of its own, again and again until the coordinator has answered: a worker whose
// coordinator is gone goes on to the end of its lease and waits there.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "client/cpp/src/step_ledger.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"

namespace precondor {

// Thread-safe; mu_ is a leaf and held over no call.
class StepControl {
 public:
  struct Options {
    std::string what;  // "session NAME: coordinator HOST:PORT", for messages
    absl::Duration lease_timeout;
  };
  // One call to the coordinator. What StepLedger leaves owed is sent again.
  using Send = std::function<absl::StatusOr<WorkerDirective>(const OwnReport& report)>;

  StepControl(Options options, uint64_t first_step, WorkerDirective directive, Send send);
  ~StepControl();
  // Ends the thread and all waiting. What a Send under way waits for has been cancelled.
  void Stop();

  // See StepLedger.
  void Adopt(WorkerDirective directive);
  Mode ModeOf(uint64_t step) const;
  uint64_t ModeSince(uint64_t step) const;
  uint64_t LastFirstOrder() const;
  // The lowest step not reported yet.
  uint64_t next_step() const;

  // Waits until `step` may be started. FailedPrecondition (STEP_TOO_FAR_AHEAD) when nothing has been reported that the
  // coordinator could still answer; DeadlineExceeded; what Fail said.
  absl::Status AwaitLease(uint64_t step);
  // Reports a finished step, and waits until the next one may be started.
  absl::StatusOr<StepDirective> Report(const OwnReport& report);
  // Ends all waiting, now and from now on.
  void Fail(const absl::Status& status);

 private:
  void Loop();
  // What became of the first report owed; true when it is done with.
  bool TakeAnswer(const absl::StatusOr<WorkerDirective>& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `number`: of the report that waits.
  absl::Status AwaitStart(uint64_t number, uint64_t next_step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status LeaseTimeout() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Send send_;

  mutable Mutex mu_;
  CondVar changed_;
  StepLedger ledger_ ABSL_GUARDED_BY(mu_);
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  std::set<uint64_t> waiting_ ABSL_GUARDED_BY(mu_);                // reports that a caller waits for
  std::map<uint64_t, absl::Status> refused_ ABSL_GUARDED_BY(mu_);  // of those
  absl::Status late_refusal_ ABSL_GUARDED_BY(mu_);  // the first of a report that no caller waits for any more
  bool away_ ABSL_GUARDED_BY(mu_) = false;          // the coordinator has kept a report waiting
  absl::Status last_failure_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread reporter_;
};

}  // namespace precondor
