// SPDX-License-Identifier: Apache-2.0
// Brings a layer back from its image and the records after it. What is applied cannot be taken back, and a step of the
// window may be asked for again, with the factors of its time: so the updates of the window's steps are not applied
// here but handed on, to be applied in their turn.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"

#include "server/core/layer_worker.h"
#include "server/core/shard_journal.h"

namespace precondor {

struct ReplayedStep {
  SettledStep settled;
  std::optional<std::vector<Vote>> votes;  // still to be applied
  bool failed = false;                     // not to be applied after all
};

// One use, one thread.
class LayerReplay {
 public:
  // `worker` is new, and outlives it.
  LayerReplay(LayerWorker& worker, uint64_t window_steps) : worker_(worker), window_(window_steps) {}

  // Before any record. Errors: those of LayerState::Load and Method::MakeState.
  absl::Status Load(const LayerImage& image);
  // Records in their order; those that the image knows of are passed over. DataLoss: some are missing before this one.
  absl::Status Add(UpdateRecord record);
  absl::Status Add(const FailedUpdateRecord& record);
  absl::Status Add(const PlanRecord& record);
  // The same, and those of Method::MakeState.
  absl::Status Add(const FactorsRecord& record);

  // Ends it. The job may have gone back to an earlier step, in epoch `began`, since the last record.
  struct Outcome {
    uint64_t began = 0;
    uint64_t updates = 0;  // of LayerStep::updates, those in `steps` not included
    std::map<uint64_t, ReplayedStep> steps;
  };
  Outcome Finish(uint64_t began);

 private:
  // DataLoss: an update that the record follows is not there. One that follows fewer was written by a layer that had
  // come back and not yet applied the window's.
  absl::Status CheckFollows(const LayerStep& at) const;
  void BeginAt(uint64_t began);
  absl::Status SetHeld(bool held);
  // DataLoss: not the next of the records that change factors.
  absl::Status Receive(const LayerStep& at);
  ReplayedStep* Find(const LayerStep& at, Mode mode);
  void Apply(ReplayedStep step);

  LayerWorker& worker_;
  const uint64_t window_;
  uint64_t began_ = 0;
  uint64_t image_updates_ = 0;
  uint64_t received_ = 0;  // of LayerStep::updates, those of the image included
  uint64_t applied_ = 0;
  std::map<uint64_t, ReplayedStep> steps_;
};

}  // namespace precondor
