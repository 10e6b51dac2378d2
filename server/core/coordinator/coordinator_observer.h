// SPDX-License-Identifier: Apache-2.0
// What a coordinator tells of its sessions, its shards and its journal.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

#include "kernels/base/session_spec.h"
#include "server/policy/fallback.h"

namespace precondor {

// See Observer for how the calls come.
class CoordinatorObserver {
 public:
  virtual ~CoordinatorObserver() = default;
  // The coordinator has a session of this job, or no longer.
  virtual void OnSessionOpened(absl::string_view train_job) {}
  virtual void OnSessionClosed(absl::string_view train_job) {}
  virtual void OnCoordinatorSessions(int64_t sessions) {}
  // How many shards have left the last three probes unanswered, when that number may have changed.
  virtual void OnUnreachableShards(int64_t shards) {}
  // Layers of a session began anew on other shards, because theirs was lost.
  virtual void OnLayersMoved(absl::string_view train_job, int64_t layers) {}
  // A snapshot of a whole session is durable on all its shards, or has failed.
  virtual void OnSessionSnapshot(absl::string_view train_job, bool complete) {}
  // The greatest step of those that are complete; also of a session that comes back from the journal.
  virtual void OnLastSessionSnapshot(absl::string_view train_job, uint64_t step) {}
  // The coordinator's journal was written, or could not be.
  virtual void OnJournal(bool ok) {}
  // What a session's policy decided on, after each step that all ranks have reported.
  virtual void OnDecision(absl::string_view train_job, const FallbackDecision& decision) {}
  // A change of mode has been written down; it holds from a step that no rank has begun.
  virtual void OnModeChange(absl::string_view train_job, Mode mode) {}
  // All ranks have reported `step`; `loss` is not finite when none of theirs was.
  virtual void OnStepReported(absl::string_view train_job, uint64_t step, double loss, Mode mode) {}
  // The last step that any rank of the session may begin now.
  virtual void OnLease(absl::string_view train_job, uint64_t through_step) {}
  virtual void OnEpoch(absl::string_view train_job, uint64_t epoch, int64_t joined, int64_t world_size) {}
};

}  // namespace precondor
