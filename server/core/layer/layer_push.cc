// SPDX-License-Identifier: Apache-2.0
// What happens to statistics. The calling thread stages them, files them in the machine's slot of their rank and
// acknowledges them. When the machine has sealed the slots of the step, the layer's strand updates the factors.
#include <utility>

#include "kernels/base/error_reason.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/layer/payload.h"

namespace precondor {

void LayerDriver::SubmitStatistics(AdmittedContribution contribution, Payload payload, const AckFn& ack) {
  const ContributionHeader& header = contribution.header();
  Staged staged{.digest = Digest(header, payload, /*device_plane=*/false),
                .bytes = static_cast<int64_t>(payload.size()),
                .contribution = {.samples = header.samples}};
  if (!header.abstain) {
    staged.refusal =
        CheckStatistics(session_->spec, header, payload, session_->shard->options.max_norm_per_sqrt_element);
    staged.status = staged.refusal.ok() ? ContributionStatus::kPresent : ContributionStatus::kRefused;
    staged.contribution.scales = {header.tensors[0].scale, header.tensors[1].scale};
    staged.contribution.rows = RowsOf(session_->spec, header);
    staged.contribution.bytes = std::move(payload);
  }
  Filed filed = FileContribution(contribution, staged);
  if (filed.taken.ok() && !staged.refusal.ok()) filed.taken = staged.refusal;
  Acknowledge(header.kind, staged.bytes, std::move(filed.taken), ack);
  Perform(std::move(filed.tasks));
}

LayerDriver::Filed LayerDriver::FileContribution(const AdmittedContribution& contribution, Staged& staged) {
  const ContributionHeader& header = contribution.header();
  Filed filed;
  filed.tasks = FeedLocked(ContributionArrived{.key = header.key,
                                               .kind = header.kind,
                                               .mode = header.mode,
                                               .status = staged.status,
                                               .digest = staged.digest,
                                               .elements = SentElements(staged.contribution.parts),
                                               .now = session_->shard->clock.Now()},
                           &staged.contribution);
  filed.taken = OutcomeOf(filed.tasks.front().effect);
  return filed;
}

absl::StatusOr<bool> LayerDriver::OutcomeOf(const Effect& effect) {
  if (const auto* refuse = std::get_if<Refuse>(&effect)) return refuse->status;
  return std::get<precondor::Acknowledge>(effect).duplicate;
}

void LayerDriver::Acknowledge(ContributionKind kind, int64_t bytes, absl::StatusOr<bool> taken, const AckFn& ack) {
  LayerObserver& observer = session_->shard->layer_observer;
  const std::string& name = session_->spec.name;
  if (!taken.ok()) {
    observer.OnRejected(name, kind, GetErrorReason(taken.status()));
    MutexLock lock(mu_);
    counters_.CountRejected();
  } else if (*taken) {
    observer.OnDuplicate(name, kind);
  } else {
    observer.OnContribution(name, kind, bytes);
  }
  ack(std::move(taken));
}

// Runs on the strand when the step has its turn.
void LayerDriver::Update(const ApplyUpdate& effect, Task& task) {
  const std::string& job = session_->spec.name;
  const std::string& layer = session_->spec.layers[layer_].name;
  ShardContext& shard = *session_->shard;
  LayerWorker::UpdateOutcome outcome = worker_.Update(std::move(task.contributions));
  task.data->update = std::move(outcome.update);
  if (outcome.attempted) task.data->update_took = outcome.took;
  const bool failed = outcome.attempted && !outcome.status.ok();
  if (outcome.attempted) shard.layer_observer.OnUpdate(job, outcome.took, outcome.status.ok());
  if (failed) {
    shard.logger.Log(Severity::kWarning, "factor update failed; the last good factors stay",
                     {{"session", job},
                      {"step", effect.step},
                      {"layer", layer},
                      {"reason", absl::string_view(outcome.status.message())}});
  }
  if (outcome.decomposition_failed) {
    shard.logger.Log(Severity::kWarning,
                     outcome.reset ? "factors failed to decompose again and are reset"
                                   : "factors were not decomposed; the last good decomposition stays",
                     {{"session", job}, {"step", effect.step}, {"layer", layer}});
  }
  Tasks tasks;
  {
    MutexLock lock(mu_);
    counters_.CountUpdate(outcome);
    tasks = Feed(UpdateDone{.id = effect.id,
                            .step = effect.step,
                            .logged = effect.logged,
                            .restored = effect.restored,
                            .failed = failed,
                            .held = outcome.state.held,
                            .factor_version = outcome.state.version});
  }
  Perform(std::move(tasks));
}

}  // namespace precondor
