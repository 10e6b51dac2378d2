// SPDX-License-Identifier: Apache-2.0
// Brings a layer back from its image and the records after it. What is applied cannot be taken back, and a step of the
// window may be asked for again, with the factors of its time: so the updates of the window's steps are not applied
// here but handed on, to be applied in their turn.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/core/layer/layer_worker.h"
#include "server/core/shard/shard_journal.h"

namespace precondor {

struct ReplayedStep {
  StepOutcome outcome;
  std::optional<std::vector<StagedContribution>> contributions;  // still to be applied
  bool failed = false;                                           // not to be applied after all
};

// One use, one thread.
class LayerReplay {
 public:
  // The layer's factors as they were released, from ShardJournal::ReadFactors.
  using ReadFactors = std::function<absl::StatusOr<std::string>(uint64_t eviction_id)>;

  // `worker` is new, and outlives it.
  LayerReplay(LayerWorker& worker, uint64_t window_steps, ReadFactors read)
      : worker_(worker), window_(window_steps), read_(std::move(read)) {}

  // Before any record. Errors: those of LayerState::Load and Method::MakeState.
  absl::Status Load(const LayerImage& image);
  // Records in their order; those that the image knows of are passed over. DataLoss: some are missing before this one.
  absl::Status Add(UpdateRecord record);
  absl::Status Add(const FailedUpdateRecord& record);
  absl::Status Add(const PlanRecord& record);
  // The same, and those of Method::MakeState. DataLoss as well: the factors that came back are not to be had again.
  absl::Status Add(const FactorsRecord& record);

  // Ends it. The job may have gone back to an earlier step, in epoch `rollback_epoch`, since the last record.
  struct Outcome {
    uint64_t rollback_epoch = 0;
    uint64_t updates = 0;      // of LayerStep::updates, those in `steps` not included
    uint64_t eviction_id = 0;  // see LayerImage
    // The factors of that eviction, where the records made them and not a snapshot: it may not be durable.
    std::optional<std::string> released;
    std::map<uint64_t, ReplayedStep> steps;
  };
  Outcome Finish(uint64_t rollback_epoch, int32_t staleness_steps);

 private:
  // DataLoss: an update that the record follows is missing. One that follows fewer was written by a layer that had
  // come back and not yet applied the window's.
  absl::Status CheckFollows(const LayerStep& at) const;
  void BeginAt(uint64_t rollback_epoch);
  absl::Status SetHeld(bool held);
  absl::Status LoadReleased(uint64_t eviction_id);
  // DataLoss: not the next of the records that change factors.
  absl::Status Receive(const LayerStep& at);
  ReplayedStep* Find(const LayerStep& at, Mode mode);
  void Apply(ReplayedStep step);
  // An answer shows that the updates before it were made: those without a record (LayerJournal) are given up, so that
  // no step waits for statistics that ranks may keep no more.
  void GiveUpUnlogged(int32_t staleness_steps);

  LayerWorker& worker_;
  const uint64_t window_;
  const ReadFactors read_;
  uint64_t rollback_epoch_ = 0;
  uint64_t image_updates_ = 0;
  uint64_t received_ = 0;  // of LayerStep::updates, those of the image included
  uint64_t applied_ = 0;
  uint64_t eviction_id_ = 0;
  std::optional<std::string> released_;
  std::map<uint64_t, ReplayedStep> steps_;
};

}  // namespace precondor
