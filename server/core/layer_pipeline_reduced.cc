// SPDX-License-Identifier: Apache-2.0
// Gradients that come added up, by way of a communicator.
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/layer_pipeline.h"
#include "server/core/payload.h"

namespace precondor {
namespace {

uint64_t SamplesOf(const ReducedGradient& gradient) {
  uint64_t samples = 0;
  for (const ReducedGradient::Share& share : gradient.shares) samples += share.samples;
  return samples;
}

Standing StandingOf(const ReducedGradient::Share& share) {
  if (share.refused) return Standing::kRefused;
  return share.samples == 0 ? Standing::kAbstained : Standing::kVoted;
}

}  // namespace

absl::Status LayerPipeline::SubmitReduced(ReducedGradient gradient, ResultFn result) {
  const ContributionKey key = {
      .session_id = gradient.session_id, .epoch = gradient.epoch, .step = gradient.step, .layer = gradient.layer};
  const std::string& job = session_->spec.name;
  Observer& observer = session_->shard->observer;
  bool work = false;
  std::vector<ResultFn> retired;
  const int64_t bytes = static_cast<int64_t>(gradient.average.size());
  absl::Status status = PutReduced(gradient, work, retired);
  for (ResultFn& waiter : retired) waiter(Expired());
  if (status.ok()) {
    for (const ReducedGradient::Share& share : gradient.shares) {
      observer.OnContribution(job, ContributionKind::kGradient, StandingOf(share) == Standing::kVoted ? bytes : 0);
    }
    AwaitResult(key, std::move(result));
  }
  if (work) Schedule();
  return status;
}

absl::Status LayerPipeline::PutReduced(ReducedGradient& gradient, bool& work, std::vector<ResultFn>& retired) {
  ContributionKey key = {
      .session_id = gradient.session_id, .epoch = gradient.epoch, .step = gradient.step, .layer = gradient.layer};
  MutexLock lock(mu_);
  PRECONDOR_RETURN_IF_ERROR(CheckEpoch(key));
  std::vector<Standing> standings;
  for (key.rank = 0; key.rank < gradient.shares.size(); ++key.rank) {
    heard_.insert(key.rank);
    Settle(ContributionKind::kGradient, key);
    work = NoteBegun(key, retired) || work;
    standings.push_back(StandingOf(gradient.shares[key.rank]));
  }
  key.rank = 0;
  PRECONDOR_RETURN_IF_ERROR(CheckStepLocked(key, gradient.mode));
  StepSlot& slot = OpenSlot(key.step, gradient.mode, retired);
  Phase& phase = slot.gradient;
  if (!phase.untouched()) {
    return absl::AbortedError(
        absl::StrCat(DescribeKey(session_->spec, key), ": gradients of this step have come over gRPC"));
  }
  phase.gather.PutAll(standings,
                      Vote{.samples = SamplesOf(gradient), .bytes = std::move(gradient.average), .whole = true});
  stats_.accepted += static_cast<uint64_t>(phase.gather.voted());
  RaiseTo(session_->last_step, key.step);
  if (gradient.mode == Mode::kFirstOrder) RaiseTo(session_->after_last_first_order, key.step + 1);
  slot.in_flight += phase.gather.count();
  session_->shard->in_flight.fetch_add(phase.gather.count(), std::memory_order_relaxed);
  SealIfDue(slot, ContributionKind::kGradient, session_->shard->clock.Now());
  work = true;
  return absl::OkStatus();
}

}  // namespace precondor
