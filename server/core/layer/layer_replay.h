// SPDX-License-Identifier: Apache-2.0
// Restores a layer from its image and the records after it. An applied update cannot be undone, and ranks may ask for a
// step of the window again, with the factors of that step. So the updates of the window's steps are not applied here
// but returned, and the layer applies them in their turn.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"

#include "server/core/api/shard_journal.h"
#include "server/core/layer/layer_worker.h"

namespace precondor {

struct ReplayedStep {
  StepOutcome outcome;
  std::optional<std::vector<StagedContribution>> contributions;  // not applied yet
  bool failed = false;                                           // the update failed, and is not to be applied
  bool numbered = true;                                          // the update counts in LayerStep::updates
  bool in_image = false;                                         // the image's factors include the update
  std::optional<GradientResult> answer = {};                     // made again from the journal's gradient
};

// Restores one layer. For one use, by one thread.
class LayerReplay {
 public:
  // `worker` must be new and must outlive this object.
  LayerReplay(LayerWorker& worker, uint64_t window_steps) : worker_(worker), window_(window_steps) {}

  // Loads the image. Precondition: no record has been added. Returns the errors of LayerState::Load.
  absl::Status Load(const LayerImage& image);
  // Add the next record. Records that the image includes already are ignored. Returns DataLoss if records before this
  // one are missing.
  absl::Status Add(UpdateRecord record);
  absl::Status Add(const FailedUpdateRecord& record);
  absl::Status Add(const PlanRecord& record);
  // Adds the next gradient or covariances. Precondition: all records of the other kinds have been added. Ignores a
  // record that the factors include, that factors before them included, or that does not follow: then the journal lacks
  // records.
  absl::Status Add(GradientRecord record);

  // Ends the replay. `rollback_epoch` is the epoch of the job's last rollback, which may be later than the last record.
  struct Outcome {
    uint64_t rollback_epoch = 0;
    uint64_t updates = 0;  // LayerStep::updates without the updates in `steps`
    std::map<uint64_t, ReplayedStep> steps;
  };
  Outcome Finish(uint64_t rollback_epoch);

 private:
  // Returns DataLoss if an update that the record follows is missing. `at.updates` may be smaller than received_: a
  // restored layer writes such records before it has applied the updates of the window.
  absl::Status CheckFollows(const LayerStep& at) const;
  void BeginAt(uint64_t rollback_epoch);
  ReplayedStep* Find(const LayerStep& at, Mode mode);
  void Apply(ReplayedStep step);
  // Adds covariances: they are applied like the vectors of an UpdateRecord.
  void AddCovariances(GradientRecord record);
  // Updates the factors with the last gradient, unless the method had refused it, and makes the answer again.
  void Relearn();
  // Begins with fresh factors if the gradients are of another history than the plans: a release without a journal of
  // gradients has gone on from an older state in between.
  void CheckPlans();
  // Marks steps as updated whose updates have no record (see LayerJournal) but were made, as a later answer shows. They
  // are given up, so that no step waits for statistics that ranks may have dropped.
  void GiveUpUnlogged();

  LayerWorker& worker_;
  const uint64_t window_;
  uint64_t rollback_epoch_ = 0;
  uint64_t image_updates_ = 0;
  uint64_t received_ = 0;  // LayerStep::updates of the last record, or of the image
  uint64_t applied_ = 0;
  std::map<uint64_t, ReplayedStep> steps_;
  // The last gradient. Whether the method took it in is known from what follows.
  std::optional<GradientRecord> gradient_;
  bool relearned_ = false;
  struct LastCovariance {
    uint64_t step = 0;
    uint64_t next_version = 0;  // of the factors before the next covariances
  };
  std::optional<LastCovariance> last_covariances_;
};

}  // namespace precondor
