// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_counters.h"

#include "absl/time/time.h"

namespace precondor {

void LayerCounters::CountUpdate(const LayerWorker::UpdateOutcome& outcome) {
  if (!outcome.attempted || !outcome.status.ok()) return;
  update_seconds_ += absl::ToDoubleSeconds(outcome.took);
  stats_.update_seconds = update_seconds_ / static_cast<double>(++updates_);
}

void LayerCounters::CountAnswer(const GradientResult& answer) {
  switch (answer.decision) {
    case Decision::kPreconditioned:
      precondition_seconds_ += absl::ToDoubleSeconds(answer.took.precondition);
      stats_.precondition_seconds = precondition_seconds_ / static_cast<double>(++stats_.preconditioned);
      break;
    case Decision::kIdentity:
      ++stats_.identity;
      break;
    case Decision::kSkip:
      ++stats_.skipped;
      break;
  }
}

void LayerCounters::Show(const LayerWorker::StateView& view) {
  stats_.factor_version = view.version;
  stats_.state_bytes = view.bytes;
  stats_.input_representation = view.summary.input_representation;
  stats_.output_representation = view.summary.output_representation;
  stats_.input_rank = view.summary.input_rank;
  stats_.output_rank = view.summary.output_rank;
  stats_.input_damping = view.summary.input_damping;
  stats_.output_damping = view.summary.output_damping;
  stats_.failed_decompositions = view.summary.failed_decompositions;
  stats_.factor_resets = view.summary.resets;
}

}  // namespace precondor
