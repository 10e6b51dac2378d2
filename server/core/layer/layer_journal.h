// SPDX-License-Identifier: Apache-2.0
// One layer's side of the journal: it numbers the layer's records, knows which of its steps may be asked for again, and
// gives the layer's images for snapshots.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "server/core/layer/layer_worker.h"
#include "server/core/shard/session_context.h"
#include "server/core/shard/shard_journal.h"

namespace precondor {

// Used on the layer's strand alone. Writes nothing when the shard has no journal.
class LayerJournal {
 public:
  // `rollback_epoch`: see LayerStep.
  LayerJournal(SessionContext& session, uint32_t layer, uint64_t rollback_epoch);

  // Work on `step` begins. Gives the layer's image when a snapshot's step lies between the last step worked on and this
  // one.
  void BeginStep(uint64_t rollback_epoch, uint64_t step, const LayerWorker& worker);
  // The layer has factors from outside, as of `step`: gives its image.
  void BeginAt(uint64_t step, const LayerWorker& worker);
  // The contributions are about to be applied. `logged`: a record says so already.
  void BeforeUpdate(uint64_t step, std::vector<StagedContribution>& contributions, bool logged);
  void AfterFailedUpdate(uint64_t step);
  // The answer is made and no rank has heard of it.
  void BeforeAnswer(uint64_t step, Mode mode, const Plan& plan);

  // The layer has no factors any more, or some again: those of `eviction_id`, or, with 0, fresh ones. As FactorsRecord.
  void FactorsChanged(bool held, uint64_t eviction_id);
  // The last whose factors were to be kept; 0: none. See LayerImage.
  uint64_t eviction_id() const { return eviction_id_; }

  // What a restored layer goes on from.
  void Resume(uint64_t rollback_epoch, uint64_t updates, uint64_t eviction_id, std::vector<StepOutcome> outcomes);

 private:
  void GiveImage(uint64_t snapshot_step, const LayerWorker& worker);
  LayerStep At(uint64_t step) const;
  StepOutcome& OutcomeOf(uint64_t step, Mode mode);
  // The last step at or before `step` as of which a snapshot is taken; 0: none.
  uint64_t SnapshotStepBefore(uint64_t step) const;

  SessionContext& session_;
  ShardJournal* const journal_;
  const uint32_t layer_;
  const bool logs_updates_;  // covariances are O(d^2): such layers come back from their snapshots alone
  uint64_t rollback_epoch_;
  uint64_t updates_ = 0;
  uint64_t eviction_id_ = 0;
  uint64_t last_snapshot_step_ = 0;
  uint64_t last_step_ = 0;            // worked on
  std::deque<StepOutcome> outcomes_;  // ascending, a window's
};

}  // namespace precondor
