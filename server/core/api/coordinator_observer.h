// SPDX-License-Identifier: Apache-2.0
// Events that a coordinator reports about its sessions, shards and journal.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"
#include "server/policy/fallback.h"

namespace precondor {

// Observer has the rules for calls. By default every method does nothing.
class CoordinatorObserver {
 public:
  virtual ~CoordinatorObserver() = default;
  // A session of this job was opened, or closed.
  virtual void OnSessionOpened(absl::string_view train_job) {}
  virtual void OnSessionClosed(absl::string_view train_job) {}
  virtual void OnCoordinatorSessions(int64_t sessions) {}
  // Number of shards that left the last three probes unanswered; reported when it may have changed.
  virtual void OnUnreachableShards(int64_t shards) {}
  // A snapshot of a whole session became durable on all its shards, or failed.
  virtual void OnSessionSnapshot(absl::string_view train_job, bool complete) {}
  // Greatest step of the session's complete snapshots; also reported when the session is restored from the journal.
  virtual void OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) {}
  // The coordinator's journal was written, or could not be written.
  virtual void OnJournal(bool ok) {}
  // The policy's decision after each step that all ranks have reported.
  virtual void OnDecision(absl::string_view train_job, const FallbackDecision& decision) {}
  // A change of mode was written to the journal. It takes effect at a step that no rank has begun.
  virtual void OnModeChange(absl::string_view train_job, Mode mode) {}
  // All ranks have reported `step`. `loss` is not finite if no rank's loss was.
  virtual void OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) {}
  // The last step that a rank of the session may begin now.
  virtual void OnLease(absl::string_view train_job, uint64_t through_step) {}
  virtual void OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) {}
};

}  // namespace precondor
