// SPDX-License-Identifier: Apache-2.0
#include "server/core/peer_replay.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

PeerReplay::PeerReplay(std::shared_ptr<SessionContext> session, std::set<uint32_t> layers, ReadFactors read,
                       std::function<bool()> wanted)
    : session_(std::move(session)), layers_(std::move(layers)), read_(std::move(read)), wanted_(std::move(wanted)) {}

PeerReplay::Heir& PeerReplay::Begin(uint32_t layer, bool held) {
  Heir& heir = heirs_[layer] = {};
  heir.worker = std::make_unique<LayerWorker>(*session_, layer, nullptr);
  heir.replay = std::make_unique<LayerReplay>(*heir.worker, session_->shard->options.window_steps,
                                              [this, layer](uint64_t release) { return read_(release, layer); });
  if (held) heir.status = heir.worker->MakeFresh();
  return heir;
}

void PeerReplay::Add(const SessionInstall& install, const LayerImage& image) {
  if (!layers_.contains(image.at.layer)) return;
  epoch_ = std::max(epoch_, install.epoch);
  went_back_ = std::max(went_back_, install.went_back_epoch);
  Heir& heir = Begin(image.at.layer, /*held=*/false);
  heir.status = heir.replay->Load(image);
}

void PeerReplay::Install(const SessionInstall& install) {
  if (install.epoch <= epoch_) return;
  epoch_ = install.epoch;
  went_back_ = std::max(went_back_, install.went_back_epoch);
  for (const uint32_t layer : layers_) {
    const bool owned = std::binary_search(install.layers.begin(), install.layers.end(), layer);
    if (!owned) {
      heirs_.erase(layer);
    } else if (!heirs_.contains(layer)) {
      Begin(layer, !install.factors_released);
    }
  }
}

void PeerReplay::Add(ShardRecord record) {
  if (const auto* install = std::get_if<InstallRecord>(&record)) {
    if (install->install.session_id == session_id()) Install(install->install);
    return;
  }
  if (const auto* removal = std::get_if<RemoveRecord>(&record)) {
    if (removal->session_id == session_id()) heirs_.clear();
    return;
  }
  std::visit(
      [this](auto& of_layer) {
        using Record = std::decay_t<decltype(of_layer)>;
        if constexpr (!std::is_same_v<Record, InstallRecord> && !std::is_same_v<Record, RemoveRecord>) {
          const auto heir = of_layer.at.session_id == session_id() ? heirs_.find(of_layer.at.layer) : heirs_.end();
          if (heir == heirs_.end() || !heir->second.status.ok()) return;
          heir->second.status = heir->second.replay->Add(std::move(of_layer));
        }
      },
      record);
}

absl::Status PeerReplay::LoadKept(uint32_t layer, LayerWorker& worker, LayerReplay::Outcome& outcome) const {
  if (outcome.release == 0 || outcome.release == kAwaitedRelease) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, ": the shard had no factors of it"));
  }
  absl::StatusOr<std::string> kept = absl::NotFoundError("");
  if (outcome.released.has_value()) {
    kept = *std::move(outcome.released);
  } else {
    kept = read_(outcome.release, layer);
  }
  if (!kept.ok()) {
    return absl::DataLossError(absl::StrCat("layer ", layer, ": factors of release ", outcome.release,
                                            ", which the shard kept: ", kept.status().message()));
  }
  PRECONDOR_RETURN_IF_ERROR(worker.MakeFresh());
  return worker.Load(*kept);
}

absl::StatusOr<PeerFactorState> PeerReplay::Finish(uint32_t layer) {
  auto found = heirs_.extract(layer);
  if (found.empty()) {
    if (const auto damaged = damaged_.find(layer); damaged != damaged_.end()) return damaged->second;
    return absl::NotFoundError(absl::StrCat("layer ", layer, ": the shard did not have it"));
  }
  Heir& heir = found.mapped();
  PRECONDOR_RETURN_IF_ERROR(heir.status);
  LayerReplay::Outcome outcome = heir.replay->Finish(went_back_);
  if (!heir.worker->has_factors()) PRECONDOR_RETURN_IF_ERROR(LoadKept(layer, *heir.worker, outcome));
  // Nobody asks here for the window's steps with the factors of their time.
  for (auto& [step, replayed] : outcome.steps) {
    if (!replayed.votes.has_value() || replayed.failed || step < outcome.inherited_before) continue;
    heir.worker->Update(*std::move(replayed.votes));
  }
  if (heir.worker->view().version == 0) {
    return absl::NotFoundError(absl::StrCat("layer ", layer, ": the shard had made no update of it yet"));
  }
  return PeerFactorState{.state = heir.worker->TakeState(), .began = outcome.began, .next_update = outcome.next_update};
}

}  // namespace precondor
