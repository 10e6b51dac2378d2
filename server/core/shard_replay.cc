// SPDX-License-Identifier: Apache-2.0
// A shard that comes back from its journal.
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/session_context.h"
#include "server/core/shard.h"
#include "server/core/shard_session.h"

namespace precondor {

void Shard::GiveUp(uint64_t session_id, const absl::Status& why) {
  const bool aside = IsAside(session_id);
  context_->logger.Log(Severity::kError,
                       aside ? "session cannot come back from quarantine, and stays there"
                             : "session cannot come back; its factors are lost",
                       {{"session_id", session_id}, {"reason", absl::string_view(why.message())}});
  if (const absl::StatusOr<bool> removed = RemoveRecorded(session_id, false); !removed.ok()) return;
  MutexLock lock(mu_);
  given_up_.insert(session_id);
}

void Shard::LeaveAlone(uint64_t session_id, const absl::Status& why) {
  MutexLock lock(mu_);
  given_up_.insert(session_id);
  no_room_[session_id] = why;
}

absl::Status Shard::replay_status() const {
  MutexLock lock(mu_);
  return no_room_.empty() ? absl::OkStatus() : no_room_.begin()->second;
}

bool Shard::IsGivenUp(uint64_t session_id) const {
  MutexLock lock(mu_);
  return given_up_.contains(session_id);
}

void Shard::Replay(ShardRecord record) {
  if (const auto* install = std::get_if<InstallRecord>(&record)) {
    // A later epoch of what is lost, or an install that was under way when the session went to quarantine.
    if (IsGivenUp(install->install.session_id) || !CheckNotAside(install->install.session_id).ok()) return;
    const bool known = FindAny(install->install.session_id).ok();
    const absl::Status status = InstallRecorded(install->install, false).status();
    // Of a known session an older install is no news, and one that was refused then is refused again.
    if (status.ok() || known) return;
    if (absl::IsResourceExhausted(status)) return LeaveAlone(install->install.session_id, status);
    GiveUp(install->install.session_id, status);
    return;
  }
  if (const auto* removal = std::get_if<RemoveRecord>(&record)) {
    (void)RemoveRecorded(removal->session_id, false).ok();
    MutexLock lock(mu_);
    given_up_.erase(removal->session_id);
    no_room_.erase(removal->session_id);
    aside_.erase(removal->session_id);
    return;
  }
  if (const auto* quarantine = std::get_if<QuarantineRecord>(&record)) {
    if (quarantine->back) return;
    (void)RemoveRecorded(quarantine->session_id, false).ok();
    return SetAside(quarantine->session_id,
                    {.state = Aside::State::kParting, .last_step = quarantine->last_step, .work = {}});
  }
  std::visit(
      [this](auto& of_layer) {
        if constexpr (requires { of_layer.at; }) {
          ReplayLayer(of_layer.at, [&of_layer](LayerDriver& layer) { return layer.Replay(std::move(of_layer)); });
        }
      },
      record);
}

void Shard::Replay(const LayerImage& image) {
  ReplayLayer(image.at, [&image](LayerDriver& layer) { return layer.Replay(image); });
}

void Shard::ReplayLayer(const LayerStep& at, absl::FunctionRef<absl::Status(LayerDriver&)> apply) {
  const absl::StatusOr<std::shared_ptr<ShardSession>> session = FindAny(at.session_id);
  if (!session.ok()) return;
  LayerDriver* const layer = (*session)->layer(at.layer);
  const absl::Status status =
      layer == nullptr ? absl::DataLossError(absl::StrCat("layer ", at.layer, ": not one of the session's here"))
                       : apply(*layer);
  if (!status.ok()) GiveUp(at.session_id, status);
}

absl::Status Shard::RequestSnapshot(absl::string_view session_name, uint64_t step) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  if (context_->options.journal == nullptr) {
    return absl::FailedPreconditionError("snapshot: this shard has no data directory");
  }
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) {
    if (session->spec().name == session_name) return session->RequestSnapshot(step);
  }
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session \"", session_name, "\": not on this shard"));
}

absl::StatusOr<SnapshotProgress> Shard::TakeSnapshot(const SnapshotOrder& order) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  ShardJournal* const journal = context_->options.journal;
  if (journal == nullptr) return absl::FailedPreconditionError("snapshot: this shard has no data directory");
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, Find(order.session_id));
  PRECONDOR_ASSIGN_OR_RETURN(const std::optional<SnapshotProgress> known, journal->ProgressOf(order));
  if (known.has_value()) return *known;
  if (order.again) {
    // What it would take now need not fit to what the other shards took.
    return absl::FailedPreconditionError(absl::StrCat("session \"", session->spec().name, "\" snapshot ", order.number,
                                                      ": the shard was restarted before it was durable"));
  }
  journal->Expect(order);
  if (order.restores) return SnapshotProgress{};
  PRECONDOR_RETURN_IF_ERROR(session->RequestSnapshot(order.step));
  return SnapshotProgress{};
}

absl::StatusOr<std::shared_ptr<ShardSession>> Shard::FindRestorable(uint64_t session_id, uint32_t index) const {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<ShardSession> session, Find(session_id));
  const SessionSpec& spec = session->spec();
  const LayerDriver* const layer = session->layer(index);
  if (layer == nullptr) {
    return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotOwner,
                          absl::StrCat("session \"", spec.name, "\" layer ", index, ": not on this shard"));
  }
  const ShardSessionSummary summary = session->summary();
  if (summary.joined > 0 || summary.factors_released) {
    return absl::FailedPreconditionError(absl::StrCat(
        "session \"", spec.name, "\" layer \"", layer->spec().name, "\": cannot be restored, ",
        summary.joined > 0 ? "the session is in use" : "the session is in first order and holds no factors"));
  }
  return session;
}

absl::StatusOr<uint64_t> Shard::RestorableBytes(uint64_t session_id, uint32_t layer) const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindRestorable(session_id, layer));
  const Method& method = session->context().methods.of(layer);
  return static_cast<uint64_t>(method.SavedBytes(session->spec().layers[layer]));
}

absl::Status Shard::RestoreLayer(const LayerImage& image) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session,
                             FindRestorable(image.at.session_id, image.at.layer));
  const SessionSpec& spec = session->spec();
  LayerDriver* const layer = session->layer(image.at.layer);
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<LayerState> state, session->context().MakeState(layer->index()));
  if (image.held) {
    if (const absl::Status loaded = state->Load(image.state); !loaded.ok()) {
      return absl::Status(loaded.code(), absl::StrCat("session \"", spec.name, "\" layer \"", layer->spec().name,
                                                      "\": ", loaded.message()));
    }
  }
  layer->Restore(std::move(state), image.at.step);
  return absl::OkStatus();
}

absl::Status Shard::CheckServing() const {
  if (!restoring_.load(std::memory_order_acquire)) return absl::OkStatus();
  return absl::UnavailableError("the shard is bringing its sessions back");
}

std::vector<uint64_t> Shard::FinishReplay() {
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) session->FinishReplay();
  std::vector<uint64_t> given_up;
  {
    MutexLock lock(mu_);
    given_up.assign(given_up_.begin(), given_up_.end());
    given_up_.clear();
  }
  // What their log holds leads nowhere, and may be followed by a new beginning.
  for (uint64_t session_id : given_up) Record(RemoveRecord{session_id});
  restoring_.store(false, std::memory_order_release);
  if (ShardJournal* const journal = context_->options.journal; journal != nullptr) {
    for (const QuarantinedSession& session : journal->ListQuarantined()) SetAside(session.install.session_id, {});
  }
  return given_up;
}

}  // namespace precondor
