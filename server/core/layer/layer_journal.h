// SPDX-License-Identifier: Apache-2.0
// Writes the records and images of one layer to the shard's journal.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "server/core/api/shard_journal.h"
#include "server/core/layer/layer_worker.h"
#include "server/core/resources/session_context.h"

namespace precondor {

// Numbers the layer's records, keeps the outcomes of the steps that ranks may ask for again, and gives the journal the
// layer's images for snapshots. Used on the layer's strand alone. Writes nothing if the shard has no journal.
class LayerJournal {
 public:
  // `rollback_epoch` is as in LayerStep.
  LayerJournal(SessionContext& session, uint32_t layer, uint64_t rollback_epoch);

  // Notes that work on `step` begins. Gives the journal the layer's image if the step of a snapshot lies after the last
  // step worked on and not after `step`.
  void BeginStep(uint64_t rollback_epoch, uint64_t step, const LayerWorker& worker);
  // Gives the journal the layer's image as it is now, as of `step`, which no layer of the session has begun.
  void GiveImage(uint64_t rollback_epoch, uint64_t step, const LayerWorker& worker);
  // Records the contributions that are about to be applied. `logged` means that the journal has the record already.
  void BeforeUpdate(uint64_t step, const LayerWorker& worker, std::vector<StagedContribution>& contributions,
                    bool logged);
  void AfterFailedUpdate(uint64_t step);
  // Records the average that is about to update the factors, and requests a snapshot if one is due. Precondition:
  // worker.LearnsFrom(data).
  void BeforeGradient(uint64_t step, LayerWorker& worker, StepData& data);
  // Records the plan of an answer that no rank has received yet.
  void BeforeAnswer(uint64_t step, Mode mode, const Plan& plan);

  // Sets the state from which a restored layer continues.
  void Resume(uint64_t rollback_epoch, uint64_t updates, std::vector<StepOutcome> outcomes);

 private:
  // Notes the job's last rollback if it is a new one. `step` is the next step of the layer.
  void NoteRollback(uint64_t rollback_epoch, uint64_t step);
  void Keep(uint64_t snapshot_step, const LayerWorker& worker);
  // Requests a snapshot as of a step that no layer has begun.
  void RequestSnapshot();
  LayerStep At(uint64_t step) const;
  StepOutcome& OutcomeOf(uint64_t step, Mode mode);
  // Returns the last step at or before `step` as of which a snapshot is taken; 0 means none.
  uint64_t SnapshotStepBefore(uint64_t step) const;

  SessionContext& session_;
  ShardJournal* const journal_;
  const uint32_t layer_;
  const bool covariances_;  // statistics are as large as the layer, and are journalled like gradients
  uint64_t rollback_epoch_;
  uint64_t updates_ = 0;
  uint64_t last_snapshot_step_ = 0;
  uint64_t last_step_ = 0;            // last step that was worked on
  std::deque<StepOutcome> outcomes_;  // of the window's steps, ascending
};

}  // namespace precondor
