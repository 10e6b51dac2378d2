// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_replay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

absl::Status LayerReplay::Load(const LayerImage& image) {
  PRECONDOR_RETURN_IF_ERROR(worker_.Load(image.state));
  rollback_epoch_ = image.at.rollback_epoch;
  image_updates_ = received_ = applied_ = image.at.updates;
  for (const StepOutcome& outcome : image.outcomes) {
    steps_[outcome.step] = {.outcome = outcome, .contributions = {}, .in_image = outcome.updated};
  }
  return absl::OkStatus();
}

void LayerReplay::Apply(ReplayedStep step) {
  if (!step.contributions.has_value()) return;
  if (step.numbered) ++applied_;
  // An update that failed before the restart had no effect. An update that fails only now leaves the factors as a
  // failure before the restart would have.
  if (!step.failed) worker_.Update(*std::move(step.contributions));
}

void LayerReplay::BeginAt(uint64_t rollback_epoch) {
  if (rollback_epoch <= rollback_epoch_) return;
  rollback_epoch_ = rollback_epoch;
  for (auto& [number, step] : steps_) Apply(std::move(step));
  steps_.clear();
}

ReplayedStep* LayerReplay::Find(const LayerStep& at, Mode mode) {
  BeginAt(at.rollback_epoch);
  if (at.rollback_epoch < rollback_epoch_) return nullptr;
  ReplayedStep& found = steps_
                            .try_emplace(at.step, ReplayedStep{.outcome = {.step = at.step, .mode = mode, .plan = {}},
                                                               .contributions = {}})
                            .first->second;
  while (steps_.begin()->first + window_ <= steps_.rbegin()->first) {
    const bool beyond = &steps_.begin()->second == &found;
    Apply(std::move(steps_.begin()->second));
    steps_.erase(steps_.begin());
    if (beyond) return nullptr;
  }
  return &found;
}

absl::Status LayerReplay::Add(UpdateRecord record) {
  if (record.at.updates <= image_updates_) return absl::OkStatus();
  if (record.at.updates != ++received_) {
    return absl::DataLossError(absl::StrCat("layer ", record.at.layer, " step ", record.at.step, ": expected update ",
                                            received_, ", got ", record.at.updates));
  }
  ReplayedStep* step = Find(record.at, Mode::kSecondOrder);
  if (step == nullptr) {
    Apply({.outcome = {.step = record.at.step, .plan = {}}, .contributions = std::move(record.contributions)});
    return absl::OkStatus();
  }
  step->outcome.updated = true;
  step->contributions = std::move(record.contributions);
  return absl::OkStatus();
}

absl::Status LayerReplay::Add(GradientRecord record) {
  if (record.at.updates != received_) return absl::OkStatus();
  if (!record.covariances.empty()) {
    AddCovariances(std::move(record));
    return absl::OkStatus();
  }
  if (gradient_.has_value()) {
    if (record.factor_version > gradient_->factor_version) Relearn();
    gradient_.reset();
  }
  if (record.factor_version == worker_.view().version) gradient_ = std::move(record);
  return absl::OkStatus();
}

void LayerReplay::AddCovariances(GradientRecord record) {
  uint64_t next_version = last_covariances_.has_value() ? last_covariances_->next_version : worker_.view().version;
  if (last_covariances_.has_value() && record.factor_version + 1 == next_version) {
    if (const auto last = steps_.find(last_covariances_->step); last != steps_.end()) last->second.failed = true;
    next_version = record.factor_version;
  }
  if (record.factor_version != next_version) return;
  last_covariances_ = {.step = record.at.step, .next_version = next_version + 1};
  ReplayedStep* const step = Find(record.at, Mode::kSecondOrder);
  if (step == nullptr) {
    Apply({.outcome = {.step = record.at.step, .plan = {}},
           .contributions = std::move(record.covariances),
           .numbered = false});
    return;
  }
  step->outcome.updated = true;
  step->contributions = std::move(record.covariances);
  step->numbered = false;
}

void LayerReplay::Relearn() {
  GradientRecord record = *std::exchange(gradient_, std::nullopt);
  GradientResult answer = worker_.Relearn(std::move(record.average));
  if (answer.decision != Decision::kPreconditioned) return;
  relearned_ = true;
  ReplayedStep* const step = Find(record.at, Mode::kSecondOrder);
  if (step == nullptr) return;
  step->outcome.plan = PlanOf(answer);
  step->answer = std::move(answer);
}

absl::Status LayerReplay::CheckFollows(const LayerStep& at) const {
  if (at.updates <= received_) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("layer ", at.layer, " step ", at.step, ": follows update ", at.updates,
                                          ", the last one found is ", received_));
}

absl::Status LayerReplay::Add(const FailedUpdateRecord& record) {
  PRECONDOR_RETURN_IF_ERROR(CheckFollows(record.at));
  if (record.at.updates <= image_updates_) return absl::OkStatus();
  if (const auto found = steps_.find(record.at.step); found != steps_.end()) found->second.failed = true;
  return absl::OkStatus();
}

absl::Status LayerReplay::Add(const PlanRecord& record) {
  PRECONDOR_RETURN_IF_ERROR(CheckFollows(record.at));
  if (record.at.updates < image_updates_) return absl::OkStatus();
  if (ReplayedStep* step = Find(record.at, record.mode); step != nullptr) step->outcome.plan = record.plan;
  return absl::OkStatus();
}

void LayerReplay::GiveUpUnlogged() {
  bool answered = false;  // this step or a later one
  for (auto later = steps_.rbegin(); later != steps_.rend(); ++later) {
    StepOutcome& step = later->second.outcome;
    answered = answered || step.plan.has_value();
    if (answered) step.updated = true;
  }
}

void LayerReplay::CheckPlans() {
  if (!relearned_) return;
  const auto last = std::find_if(steps_.rbegin(), steps_.rend(),
                                 [](const auto& step) { return step.second.outcome.plan.has_value(); });
  if (last == steps_.rend() || last->second.outcome.plan->factor_version >= worker_.view().version) return;
  for (auto& [number, step] : steps_) step.answer.reset();
  // The version tells ranks how many updates they lose. Without memory for fresh factors these stay.
  worker_.MakeFresh().IgnoreError();
}

LayerReplay::Outcome LayerReplay::Finish(uint64_t rollback_epoch) {
  if (last_covariances_.has_value()) {
    // The answer of the step shows whether the last update failed.
    const auto step = steps_.find(last_covariances_->step);
    const bool planned = step != steps_.end() && step->second.outcome.plan.has_value() && step->second.contributions;
    if (planned && step->second.outcome.plan->factor_version < last_covariances_->next_version)
      step->second.failed = true;
  }
  if (gradient_.has_value()) {
    const auto step = steps_.find(gradient_->at.step);
    const bool planned = step != steps_.end() && step->second.outcome.plan.has_value() &&
                         gradient_->at.rollback_epoch == rollback_epoch_;
    const bool refused = planned && step->second.outcome.plan->decision != Decision::kPreconditioned;
    if (!refused) Relearn();
  }
  CheckPlans();
  BeginAt(rollback_epoch);
  GiveUpUnlogged();
  return {.rollback_epoch = rollback_epoch_, .updates = applied_, .steps = std::move(steps_)};
}

}  // namespace precondor
