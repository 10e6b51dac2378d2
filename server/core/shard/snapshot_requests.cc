// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/snapshot_requests.h"

#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/resources/session_context.h"
#include "server/core/shard/shard_session.h"

namespace precondor {
namespace {

// Makes the layers give their images when work on `step` begins. Returns INVALID_ARGUMENT if it has already begun.
absl::Status RequestOf(SessionContext& session, uint64_t step) {
  const uint64_t last_step = session.begun_steps.last().step;
  if (step <= last_step) {
    return absl::InvalidArgumentError(absl::StrCat("session \"", session.spec.name,
                                                   "\": snapshot: expected a step after ", last_step,
                                                   ", which has begun; got ", step));
  }
  session.snapshot_at.store(step, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SnapshotProgress> SnapshotRequests::Take(const SnapshotOrder& order) {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, sessions_.Find(order.session_id));
  ShardJournal* const journal = shard_.options.journal;
  if (journal == nullptr) return TakeInMemory(order, *session);
  PRECONDOR_ASSIGN_OR_RETURN(const std::optional<SnapshotProgress> known, journal->ProgressOf(order));
  if (known.has_value()) return *known;
  if (order.repeated) {
    // A part that is taken now might not match the parts of the other shards.
    return absl::FailedPreconditionError(absl::StrCat("session \"", session->spec().name, "\" snapshot ", order.number,
                                                      ": the shard was restarted before it was durable"));
  }
  journal->Expect(order);
  if (order.restores) return SnapshotProgress{};
  PRECONDOR_RETURN_IF_ERROR(RequestOf(session->context(), order.step));
  return SnapshotProgress{};
}

absl::StatusOr<SnapshotProgress> SnapshotRequests::TakeInMemory(const SnapshotOrder& order,
                                                                const ShardSession& session) const {
  if (!order.restores) return absl::FailedPreconditionError("snapshot: this shard has no data directory");
  RestoredLayers& restored = session.context().restored_layers;
  if (!restored.ordered.exchange(true) && order.repeated) {
    return absl::FailedPreconditionError(
        absl::StrCat("session \"", session.spec().name, "\": the shard was restarted while the session was restored"));
  }
  const bool whole = absl::c_all_of(session.owned(), [&](uint32_t layer) { return restored.Has(layer); });
  return SnapshotProgress{.begun = whole, .durable = whole, .snapshot_id = whole ? order.number : 0};
}

absl::StatusOr<std::shared_ptr<ShardSession>> SnapshotRequests::FindRestorable(uint64_t session_id,
                                                                               uint32_t index) const {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<ShardSession> session, sessions_.Find(session_id));
  const SessionSpec& spec = session->spec();
  const LayerDriver* const layer = session->layer(index);
  if (layer == nullptr) {
    return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kNotOwner,
                          absl::StrCat("session \"", spec.name, "\" layer ", index, ": not on this shard"));
  }
  if (session->summary().joined > 0) {
    return absl::FailedPreconditionError(absl::StrCat("session \"", spec.name, "\" layer \"", layer->spec().name,
                                                      "\": cannot be restored, the session is in use"));
  }
  return session;
}

absl::StatusOr<uint64_t> SnapshotRequests::RestorableBytes(uint64_t session_id, uint32_t layer,
                                                           const SessionCaller& caller) const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> known, sessions_.Find(session_id));
  if (!known->context().access.IsShownBy(caller)) return NotTheirs(session_id);
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindRestorable(session_id, layer));
  const Method& method = session->context().methods.of(layer);
  return static_cast<uint64_t>(method.SavedBytes(session->spec().layers[layer]));
}

absl::Status SnapshotRequests::RestoreLayer(const LayerImage& image) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session,
                             FindRestorable(image.at.session_id, image.at.layer));
  const SessionSpec& spec = session->spec();
  LayerDriver* const layer = session->layer(image.at.layer);
  RestoredLayers& restored = session->context().restored_layers;
  // A repeated request must not make a second state beside the first one.
  const RestoredLayers::State claimed = restored.Claim(image.at.layer);
  if (claimed == RestoredLayers::State::kRestored) return absl::OkStatus();
  if (claimed == RestoredLayers::State::kLoading) {
    return ReasonedStatus(
        absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
        absl::StrCat("session \"", spec.name, "\" layer \"", layer->spec().name, "\": an earlier request restores it"));
  }
  auto unclaim = absl::MakeCleanup([&] { restored.Set(image.at.layer, RestoredLayers::State::kFresh); });
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<LayerState> state, layer->MakeFactors());
  // Nothing stands for fresh factors.
  if (!image.state.empty()) {
    if (const absl::Status loaded = state->Load(image.state); !loaded.ok()) {
      return absl::Status(loaded.code(), absl::StrCat("session \"", spec.name, "\" layer \"", layer->spec().name,
                                                      "\": ", loaded.message()));
    }
  }
  layer->RestoreFactors(std::move(state), image.at.step);
  std::move(unclaim).Cancel();
  restored.Set(image.at.layer, RestoredLayers::State::kRestored);
  return absl::OkStatus();
}

}  // namespace precondor
