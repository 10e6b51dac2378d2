// SPDX-License-Identifier: Apache-2.0
// What a shard writes down as it goes, and comes back from: a layer's factors are a function of one image of it and the
// statistics applied after. server/store keeps the records in a log and the images in snapshots; core does no file I/O.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/base/session_spec.h"
#include "server/core/contribution.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

class ShardReplay;

// Where in a layer's life a record belongs.
struct LayerStep {
  uint64_t session_id = 0;
  uint32_t layer = 0;
  uint64_t step = 0;
  uint64_t rollback_epoch = 0;  // in which the job last rolled back to an earlier step, dropping the layer's open steps
  uint64_t updates = 0;         // the layer's records of updates and factors so far, this one included: a gap shows
};

// What a step's gradient was, or will be, answered with.
struct Plan {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  std::string reason;
};

// A session was installed, or had its membership replaced.
struct InstallRecord {
  SessionInstall install;
};
struct RemoveRecord {
  uint64_t session_id = 0;
};
// A step's statistics are about to be applied, as the layer's worker applies them: contributions in rank order; none:
// skipped.
struct UpdateRecord {
  LayerStep at;
  std::vector<StagedContribution> contributions;
};
// The update before this failed and left the factors as they were: it would not fail again for every reason.
struct FailedUpdateRecord {
  LayerStep at;
};
struct PlanRecord {
  LayerStep at;
  Mode mode = Mode::kSecondOrder;
  Plan plan;
};
// From here on the layer has no factors, or has some again; see ShardControl::HoldFactors.
struct FactorsRecord {
  LayerStep at;
  bool held = false;
  // The eviction in which they went, or from which they are back, as they were; 0: they are not kept, or fresh.
  uint64_t eviction_id = 0;
};
// The session has left memory for the quarantine, or has come back from there. Records that its last work still makes
// come later.
struct QuarantineRecord {
  uint64_t session_id = 0;
  bool back = false;
  uint64_t last_step = 0;  // that had been begun
};
using ShardRecord = std::variant<InstallRecord, RemoveRecord, UpdateRecord, FailedUpdateRecord, PlanRecord,
                                 FactorsRecord, QuarantineRecord>;

// A step that repetitions may still ask for.
struct StepOutcome {
  uint64_t step = 0;
  Mode mode = Mode::kSecondOrder;
  bool updated = false;  // its statistics are in the factors, or given up
  std::optional<Plan> plan;
};

// All of a layer before the first work on step `at.step` or a later one. Every layer of a snapshot has the same step.
struct LayerImage {
  LayerStep at;
  uint64_t factor_version = 0;
  std::vector<StepOutcome> outcomes;  // the window's, ascending
  bool held = true;                   // false: the layer has no factors, `state` is empty
  uint64_t eviction_id = 0;           // the layer's last, whether its factors are back or not; 0: none was kept
  std::string state;                  // LayerState::Save
};

// The factors of a session's layers as they were when they were released.
struct ReleasedFactors {
  uint64_t session_id = 0;
  uint64_t eviction_id = 0;                // ascends, and is never used again
  std::map<uint32_t, std::string> states;  // by layer: LayerState::Save
};

// Calls come from many threads, a layer's in its order, none under a lock of core.
class ShardJournal {
 public:
  virtual ~ShardJournal() = default;
  // When it returns the operating system has the record: it outlives this process, not necessarily the machine. A
  // journal that cannot write says so in its own way and the shard goes on; it has to know later that there is a gap.
  // The caller may take the contributions back out of the record.
  virtual void Append(const ShardRecord& record) = 0;
  // When it returns, what was appended before outlives the machine too, unless the journal cannot write. A journal in
  // memory has nothing to do.
  virtual void Sync() {}
  // Takes a layer's image for a snapshot of its session, of which every layer gives one with the same step. Does not
  // wait for a disk.
  virtual void Keep(LayerImage image) = 0;
  // Takes factors that are released, to be read again. Does not wait for a disk. The records of the eviction came
  // before.
  virtual void KeepFactors(ReleasedFactors factors) = 0;
  // False: they are still on their way to the disk, and in memory. What failed is tried again, now and then.
  virtual bool FactorsKept(uint64_t session_id, uint64_t eviction_id) { return true; }
  // A layer's, as they were released. NotFound: they are not here; DataLoss; those of the disk.
  virtual absl::StatusOr<std::string> ReadFactors(uint64_t session_id, uint64_t eviction_id, uint32_t layer) {
    return absl::NotFoundError("factors are not kept here");
  }
  // --- sessions in quarantine (ShardControl::Quarantine): they do not come back by themselves
  // Whether this one can go there. Unimplemented: there is no such place; FailedPrecondition: the disk lacks records of
  // it.
  virtual absl::Status CheckQuarantine(uint64_t session_id) { return absl::UnimplementedError("no quarantine"); }
  // Puts a session there whose work has ended. Durable when it returns OK; otherwise nothing has changed. NotFound:
  // nothing is known of it. Calls that concern the same session do not overlap; this one may take long.
  virtual absl::Status Quarantine(uint64_t session_id, uint64_t last_step) { return CheckQuarantine(session_id); }
  virtual std::vector<QuarantinedSession> ListQuarantined() const { return {}; }
  // Has `replay` replay it and asks it how that went (ShardReplay::CheckReturned); durable out of quarantine when OK.
  virtual absl::Status Return(uint64_t session_id, ShardReplay& replay) { return CheckQuarantine(session_id); }
  // Deletes it. False: it was not there. Otherwise it stays as it was, or its files are gone and no restart finds it.
  virtual absl::StatusOr<bool> DeleteQuarantined(uint64_t session_id) { return false; }
  // Notes that time has passed. Returns the sessions that have been there for `most` while the shard was running.
  virtual std::vector<uint64_t> AgeQuarantined(absl::Duration most) { return {}; }

  // A snapshot as of that step is to count as the coordinator's of that number. Before any rank begins the step.
  virtual void Expect(const SnapshotOrder& order) {}
  // When it returns OK, the shard refuses coordinators with smaller fencing tokens after a crash as well.
  virtual absl::Status RememberLeader(uint64_t token) { return absl::OkStatus(); }
  // What has become of an order; nullopt: nothing is known of it. Aborted: it was given up, with the reason; those of
  // the disk.
  virtual absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) {
    return std::nullopt;
  }
};

}  // namespace precondor
