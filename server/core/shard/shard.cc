// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard/shard.h"

#include "absl/cleanup/cleanup.h"

#include "kernels/base/status_macros.h"
#include "server/core/api/shard_journal.h"
#include "server/core/shard/shard_session.h"

namespace precondor {

Shard::Shard(const ShardOptions& options, Backend& backend, Executor& executor, const Clock& clock, Logger& logger,
             Observer& observer)
    : context_(new ShardContext{.options = options,
                                .backend = backend,
                                .executor = executor,
                                .clock = clock,
                                .logger = logger,
                                .layer_observer = observer,
                                .observer = observer,
                                .memory = MemoryAccount(options.capacity_bytes, observer)}),
      gate_(clock,
            [journal = options.journal](uint64_t token) {
              return journal == nullptr ? absl::OkStatus() : journal->RememberLeader(token);
            }),
      sessions_(*context_),
      quarantine_(*context_, sessions_, serving_),
      installer_(context_, sessions_, quarantine_, serving_),
      replay_(*context_, sessions_, installer_, gate_, serving_),
      data_plane_(*context_, sessions_, serving_),
      snapshots_(*context_, sessions_, serving_),
      upkeep_(*context_, sessions_, quarantine_) {
  observer.OnDevice(device().name, true);
}

Shard::~Shard() {
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) {
    session->Close(absl::AbortedError("the shard is shutting down"));
  }
}

// --- control --------------------------------------------------------------------------------------------------------

absl::StatusOr<FencingGate::Pass> Shard::Admit(uint64_t token) {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  return gate_.Enter(token);
}

absl::StatusOr<ShardDescription> Shard::Describe() {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  ShardDescription description{
      .advertise_address = context_->options.advertise_address, .device = device(), .sessions = {}};
  for (const ShardSessionSummary& session : ListSessions()) {
    description.sessions.push_back({.session_id = session.session_id,
                                    .name = session.spec.name,
                                    .epoch = session.epoch,
                                    .reserved_bytes = session.reserved_bytes,
                                    .joined = session.joined,
                                    .last_step = session.last_step,
                                    .layers = session.layers});
  }
  return description;
}

absl::StatusOr<int64_t> Shard::Install(const SessionInstall& install) {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(const bool returned, quarantine_.BringBack(install.session_id, replay_));
  const absl::StatusOr<int64_t> bytes = installer_.Install(install, SessionInstaller::Source::kCoordinator);
  if (returned) sessions_.Release(install.session_id, /*gone=*/true);
  PRECONDOR_RETURN_IF_ERROR(bytes.status());
  // The coordinator relies on the session being here even after a power failure: later records are useless without this
  // one.
  if (context_->options.journal != nullptr) context_->options.journal->Sync();
  return *bytes;
}

absl::StatusOr<std::optional<uint64_t>> Shard::Fence(const EpochFence& fence) {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(const bool returned, quarantine_.BringBack(fence.session_id, replay_));
  const auto end = absl::MakeCleanup([&] {
    if (returned) sessions_.Release(fence.session_id, /*gone=*/true);
  });
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, sessions_.FindAny(fence.session_id));
  return session->Fence(fence);
}

absl::StatusOr<SnapshotProgress> Shard::TakeSnapshot(const SnapshotOrder& order) { return snapshots_.Take(order); }

absl::StatusOr<bool> Shard::Remove(uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  PRECONDOR_ASSIGN_OR_RETURN(const bool existed, sessions_.Remove(session_id, Removal::kPermanent));
  PRECONDOR_ASSIGN_OR_RETURN(const bool quarantined, quarantine_.Delete(session_id));
  return existed || quarantined;
}

absl::StatusOr<bool> Shard::Quarantine(uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(serving_.Check());
  return quarantine_.Put(session_id);
}

// --- inspection ------------------------------------------------------------------------------------------------------

std::vector<ShardSessionSummary> Shard::ListSessions() const {
  std::vector<ShardSessionSummary> summaries;
  for (const std::shared_ptr<ShardSession>& session : sessions_.All()) summaries.push_back(session->summary());
  return summaries;
}

absl::StatusOr<std::vector<LayerStats>> Shard::GetLayerStats(absl::string_view session_name) const {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, sessions_.FindByName(session_name));
  std::vector<LayerStats> stats;
  stats.reserve(session->owned().size());
  for (const uint32_t layer : session->owned()) stats.push_back(session->layer(layer)->stats());
  return stats;
}

}  // namespace precondor
