// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/layer_replay.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

absl::Status LayerReplay::Load(const LayerImage& image) {
  if (image.held != worker_.has_factors()) PRECONDOR_RETURN_IF_ERROR(SetHeld(image.held));
  if (image.held) PRECONDOR_RETURN_IF_ERROR(worker_.Load(image.state));
  began_ = image.at.began;
  release_ = image.release;
  image_updates_ = received_ = applied_ = image.at.updates;
  for (const StepOutcome& outcome : image.outcomes) steps_[outcome.step] = {.outcome = outcome, .contributions = {}};
  return absl::OkStatus();
}

void LayerReplay::Apply(ReplayedStep step) {
  if (!step.contributions.has_value()) return;
  ++applied_;
  // An update that failed then did so before anything came of it; one that fails now leaves the factors it would have
  // left then.
  if (!step.failed) worker_.Update(*std::move(step.contributions));
}

void LayerReplay::BeginAt(uint64_t began) {
  if (began <= began_) return;
  began_ = began;
  for (auto& [number, step] : steps_) Apply(std::move(step));
  steps_.clear();
}

ReplayedStep* LayerReplay::Find(const LayerStep& at, Mode mode) {
  BeginAt(at.began);
  if (at.began < began_) return nullptr;
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

absl::Status LayerReplay::Receive(const LayerStep& at) {
  if (at.updates == received_ + 1) {
    ++received_;
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat("layer ", at.layer, " step ", at.step, ": expected update ", received_ + 1, ", got ", at.updates));
}

absl::Status LayerReplay::Add(UpdateRecord record) {
  if (record.at.updates <= image_updates_) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(Receive(record.at));
  ReplayedStep* step = Find(record.at, Mode::kSecondOrder);
  if (step == nullptr) {
    Apply({.outcome = {.step = record.at.step, .plan = {}}, .contributions = std::move(record.contributions)});
    return absl::OkStatus();
  }
  step->outcome.updated = true;
  step->contributions = std::move(record.contributions);
  return absl::OkStatus();
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

absl::Status LayerReplay::SetHeld(bool held) {
  if (held) return worker_.MakeFresh();
  worker_.SetState(nullptr);
  return absl::OkStatus();
}

absl::Status LayerReplay::Add(const FactorsRecord& record) {
  if (record.at.updates <= image_updates_) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(Receive(record.at));
  BeginAt(record.at.began);
  // What came before belongs to the factors that go.
  for (auto& [number, step] : steps_) {
    Apply(std::exchange(step, {.outcome = step.outcome, .contributions = {}, .failed = step.failed}));
  }
  ++applied_;
  if (record.held) return record.release != 0 ? LoadReleased(record.release) : SetHeld(true);
  release_ = record.release;
  absl::StatusOr<std::string> state = absl::NotFoundError("");
  if (release_ != 0 && worker_.has_factors()) state = worker_.Save();
  if (state.ok()) released_ = *std::move(state);
  return SetHeld(false);
}

absl::Status LayerReplay::LoadReleased(uint64_t release) {
  absl::StatusOr<std::string> state = absl::NotFoundError("");
  if (release == release_ && released_.has_value()) {
    state = *std::exchange(released_, std::nullopt);
  } else {
    state = read_(release);
  }
  absl::Status status = state.status();
  if (status.ok()) status = SetHeld(true);
  if (status.ok()) status = worker_.Load(*state);
  if (status.ok()) return status;
  return absl::DataLossError(absl::StrCat("factors of release ", release, ", which were loaded: ", status.message()));
}

void LayerReplay::GiveUpUnlogged(int32_t staleness_steps) {
  bool answered = false;  // this step, or the one after it where answers are a step behind
  for (auto later = steps_.rbegin(); later != steps_.rend(); ++later) {
    const bool behind = answered;
    StepOutcome& step = later->second.outcome;
    answered = answered || step.plan.has_value();
    if (staleness_steps == 0 ? answered : behind) step.updated = true;
  }
}

LayerReplay::Outcome LayerReplay::Finish(uint64_t began, int32_t staleness_steps) {
  BeginAt(began);
  GiveUpUnlogged(staleness_steps);
  return {.began = began_,
          .updates = applied_,
          .release = release_,
          .released = std::move(released_),
          .steps = std::move(steps_)};
}

}  // namespace precondor
