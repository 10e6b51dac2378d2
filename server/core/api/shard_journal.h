// SPDX-License-Identifier: Apache-2.0
// The shard's journal: records and images from which a shard restores its sessions. A layer's factors are a function of
// one image and the statistics applied since. server/recovery implements it on disk; core does no file I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"

#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"
#include "server/core/api/shard_control.h"

namespace precondor {

class ShardReplay;

// Position of a record in the history of a layer.
struct LayerStep {
  uint64_t session_id = 0;
  uint32_t layer = 0;
  uint64_t step = 0;
  // Epoch with which the job last rolled back to an earlier step, which dropped the layer's open steps; 0: none.
  uint64_t rollback_epoch = 0;
  // Number of the layer's records of updates so far, this one included. Gaps show lost records.
  uint64_t updates = 0;
};

// The decision for the answers to a step's gradient.
struct Plan {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  std::string reason;
};

// A session was installed, or its membership was replaced.
struct InstallRecord {
  SessionInstall install;
};
struct RemoveRecord {
  uint64_t session_id = 0;
};
// A step's statistics are about to be applied: contributions in rank order, as the layer's worker applies them. Empty
// if the update is skipped.
struct UpdateRecord {
  LayerStep at;
  std::vector<StagedContribution> contributions;
};
// The update of the preceding record failed and left the factors unchanged. It is recorded because a replay might not
// fail.
struct FailedUpdateRecord {
  LayerStep at;
};
struct PlanRecord {
  LayerStep at;
  Mode mode = Mode::kSecondOrder;
  Plan plan;
};
// The factors are about to be updated with something as large as the layer: a step's average gradient, if the method
// learns from gradients, or the covariances of a step's statistics.
struct GradientRecord {
  LayerStep at;  // `updates` is not counted up
  // Version of the factors before the update. If the next record of the layer has the same version, the update failed
  // and left the factors unchanged.
  uint64_t factor_version = 0;
  StagedContribution average = {};  // in the session's gradient type, one scale
  // In rank order, as in UpdateRecord. If it is not empty, the record is of covariances, and `average` is unused.
  std::vector<StagedContribution> covariances = {};
};
// The session has left memory for quarantine, or has been restored from it. Records of its last work can still follow.
struct QuarantineRecord {
  uint64_t session_id = 0;
  bool back = false;
  uint64_t last_step = 0;  // greatest step that had begun
};
using ShardRecord =
    std::variant<InstallRecord, RemoveRecord, UpdateRecord, FailedUpdateRecord, PlanRecord, QuarantineRecord>;

// The state of a step that ranks may still repeat.
struct StepOutcome {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  bool updated = false;  // its statistics have been applied or given up
  std::optional<Plan> plan;
};

// A layer's state before its first work on step `at.step` or a later one. All images of a snapshot have one step.
struct LayerImage {
  LayerStep at;
  uint64_t factor_version = 0;
  std::vector<StepOutcome> outcomes;  // of the steps in the window, ascending
  std::string state;                  // LayerState::Save
};

// Thread-safe. Calls for one layer come in its order of work. No call is made under a lock of core.
class ShardJournal {
 public:
  virtual ~ShardJournal() = default;
  // Writes a record. When this returns, the operating system has the record: it survives a crash of the process, but
  // not necessarily of the machine. A journal that cannot write reports that itself and must remember the gap; the
  // shard continues. The caller may move the contributions back out of the record.
  virtual void Append(const ShardRecord& record) = 0;
  // Writes the gradient of a session like Append, or drops it: a journal that would hold the job up gives up the
  // session's gradients until the next snapshot, and reports that. Returns true if a snapshot of the session is due,
  // which bounds what a restart has to replay. The caller may move the contributions back out of the record.
  virtual bool AppendGradient(const GradientRecord& record) { return false; }
  // Returns since when the journal lacks gradients of the session, on the monotonic clock, or nullopt if it lacks none.
  virtual std::optional<absl::Time> LacksGradientsSince(uint64_t session_id) const { return std::nullopt; }
  // When this returns, all records appended before survive a crash of the machine, unless the journal cannot write. A
  // journal in memory does nothing.
  virtual void Sync() {}
  // Takes a layer's image for a snapshot of its session. Every layer gives one as of the snapshot's step. Does not wait
  // for a disk.
  virtual void Keep(LayerImage image) = 0;
  // Gives up the snapshots that lack images. Waits until the others are durable or given up, or until `deadline` on the
  // monotonic clock. Returns false if the deadline passed.
  virtual bool FinishSnapshots(absl::Time deadline) { return true; }
  // Returns true if a restart brings the session back as it is now.
  virtual bool HoldsAllOf(uint64_t session_id) const { return true; }
  // --- sessions in quarantine (ShardControl::Quarantine): a restart does not restore them into memory
  // Checks whether the session can be put in quarantine. Returns UNIMPLEMENTED if the journal has no quarantine,
  // FAILED_PRECONDITION if the disk lacks records of the session.
  virtual absl::Status CheckQuarantine(uint64_t session_id) { return absl::UnimplementedError("no quarantine"); }
  // Puts a session in quarantine. Precondition: all work on it has ended, and no other call for it is in progress. May
  // take long. Durable on OK; nothing has changed on error. Returns NOT_FOUND if the journal does not know the session.
  virtual absl::Status Quarantine(uint64_t session_id, uint64_t last_step) { return CheckQuarantine(session_id); }
  virtual std::vector<QuarantinedSession> ListQuarantined() const { return {}; }
  // Replays the session into `replay` and checks the result (ShardReplay::CheckReturned). On OK the return is durable.
  virtual absl::Status Return(uint64_t session_id, ShardReplay& replay) { return CheckQuarantine(session_id); }
  // Deletes the session. Returns false if it is not in quarantine. After an error the session is either unchanged or
  // removed permanently with some files left.
  virtual absl::StatusOr<bool> DeleteQuarantined(uint64_t session_id) { return false; }
  // Adds the time since the last call to the sessions' ages. Returns those that have been in quarantine for `most` of
  // the shard's running time.
  virtual std::vector<uint64_t> AgeQuarantined(absl::Duration most) { return {}; }

  // Makes the snapshot as of `order.step` count as the coordinator's snapshot `order.number`. Precondition: no rank has
  // begun the step.
  virtual void Expect(const SnapshotOrder& order) {}
  // Remembers a fencing token. After OK the shard refuses coordinators with smaller tokens even after a crash.
  virtual absl::Status RememberLeader(uint64_t token) { return absl::OkStatus(); }
  // Returns the progress of an order, or nullopt if the journal does not know it. Returns ABORTED with the reason if
  // the snapshot was given up, or an I/O error.
  virtual absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) {
    return std::nullopt;
  }
};

}  // namespace precondor
