// SPDX-License-Identifier: Apache-2.0
// Decides how far a worker may go and in which mode, and delivers its step reports to the coordinator.
//
// A thread sends each report until the coordinator answers it. Steps that no caller waits for share a call if they are
// shorter than 20 ms. While the coordinator is unreachable, the worker continues to the end of its lease and waits
// there.
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
#include "absl/types/span.h"

#include "client/cpp/src/step_ledger.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"

namespace precondor {

// StepLedger with a lock, waiting callers and the thread that sends reports. Thread-safe. mu_ is a leaf lock, and no
// hook is called under it.
class StepControl : public std::enable_shared_from_this<StepControl> {
 public:
  struct Options {
    std::string what;  // "session NAME: coordinator HOST:PORT", for messages
    absl::Duration lease_timeout;
  };
  // Makes one call to the coordinator, with at least one report. Reports that StepLedger still owes afterwards are sent
  // again.
  using Send = std::function<absl::StatusOr<WorkerDirective>(absl::Span<const OwnReport> reports)>;

  StepControl(Options options, uint64_t first_step, WorkerDirective directive, Send send);
  ~StepControl();
  // Ends the thread and all waiting calls. Precondition: a Send that is running has been cancelled.
  void Stop();

  // See StepLedger.
  void Adopt(WorkerDirective directive);
  Mode ModeOf(uint64_t step) const;
  uint64_t LastFirstOrder() const;
  // The lowest step that has not been reported.
  uint64_t next_step() const;

  // Waits until `step` may start. Returns FAILED_PRECONDITION (STEP_TOO_FAR_AHEAD) if no report is outstanding whose
  // answer could extend the lease, DEADLINE_EXCEEDED after lease_timeout, and after Fail its status.
  absl::Status AwaitLease(uint64_t step);
  // Queues the report of a finished step.
  ReportFuture Begin(const OwnReport& report);
  // Return when report `number` is settled: the next step may start, or there is an error. WaitFor returns whether it
  // is; a timeout of 0 hurries no report.
  bool WaitFor(uint64_t number, absl::Duration timeout);
  absl::StatusOr<StepDirective> Wait(uint64_t number);
  // No call will wait for report `number`.
  void Forget(uint64_t number);
  // Ends all current and later waiting with `status`.
  void Fail(const absl::Status& status);

 private:
  void Loop();
  // Waits until `until` for the condition, and has reports sent at once meanwhile. Returns the condition's last value.
  template <typename Condition>
  bool WaitUntil(absl::Time until, const Condition& condition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Handles the answer to the first `count` reports owed. Returns true if they are complete.
  bool TakeAnswer(size_t count, const absl::StatusOr<WorkerDirective>& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  struct Waiting {
    uint64_t next_step = 0;
    absl::Time patient_until;  // from then on the next step starts if the lease allows it
    absl::Time deadline;
  };
  bool IsSettled(uint64_t number, const Waiting& report) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AwaitSettled(uint64_t number, absl::Time until) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status LeaseTimeout() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const Send send_;

  mutable Mutex mu_;
  CondVar changed_;
  StepLedger ledger_ ABSL_GUARDED_BY(mu_);
  int callers_waiting_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status failed_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, Waiting> waiting_ ABSL_GUARDED_BY(mu_);       // reports whose Wait has not returned
  std::map<uint64_t, absl::Status> refused_ ABSL_GUARDED_BY(mu_);  // errors of those
  absl::Status late_refusal_ ABSL_GUARDED_BY(mu_);                 // first error of a report that is not in waiting_
  bool coordinator_unreachable_ ABSL_GUARDED_BY(mu_) = false;      // the coordinator has not answered within kPatience
  absl::Status last_failure_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread reporter_;
};

}  // namespace precondor
