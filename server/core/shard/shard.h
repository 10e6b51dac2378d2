// SPDX-License-Identifier: Apache-2.0
// A shard: the layers that one process owns, of every session, and what happens to contributions to them.
// Knows nothing of gRPC, protobuf, devices or clocks but through the interfaces it is given.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/fencing_gate.h"
#include "server/core/shard/serving_state.h"
#include "server/core/shard/session_installer.h"
#include "server/core/shard/shard_context.h"
#include "server/core/shard/shard_control.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/core/shard/shard_quarantine.h"
#include "server/core/shard/shard_replay.h"
#include "server/core/shard/shard_sessions.h"
#include "server/core/shard/shard_summary.h"
#include "server/core/shard/shard_upkeep.h"
#include "server/core/shard/snapshot_requests.h"

namespace precondor {

// Thread-safe. Puts a shard's parts together and answers the coordinator. Each part has the calls of one kind of
// caller; all look sessions up in one table.
class Shard final : public ShardControl {
 public:
  // All references outlive the shard, which has at least one device; they are alike, so that any gives a layer the same
  // bits. A layer is on one of them for as long as its session is here; one that is split is answered from there, and
  // has parts on all. Executors run the arithmetic; per layer the order is kept.
  Shard(const ShardOptions& options, std::vector<ShardDevice> devices, const Clock& clock, Logger& logger,
        Observer& observer);
  Shard(const ShardOptions& options, Backend& backend, Executor& executor, const Clock& clock, Logger& logger,
        Observer& observer);
  ~Shard() override;

  // What workers and communicators ask.
  ShardDataPlane& data_plane() { return data_plane_; }
  // How the shard comes back from its journal, before anything else is called.
  ShardReplay& replay() { return replay_; }
  // Snapshots that operators ask for, and layers that are restored from one.
  SnapshotRequests& snapshots() { return snapshots_; }
  // What is to be called as time passes.
  ShardUpkeep& upkeep() { return upkeep_; }

  // --- ShardControl: what the coordinator asks; semantics and errors are in shard_control.h ----------------------
  absl::StatusOr<ShardDescription> Describe() override;
  absl::StatusOr<ShardDescription> Probe(const ShardLease& lease) override;
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override;
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override;
  absl::Status HoldFactors(const FactorHold& hold) override;
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override;
  absl::StatusOr<bool> Remove(uint64_t session_id) override;
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override;
  absl::StatusOr<std::vector<QuarantinedSession>> ListQuarantined() override;
  // Before each of these, with the token that the call carries; the call is made while the pass is there. Errors: those
  // of FencingGate::Enter.
  absl::StatusOr<FencingGate::Pass> Admit(uint64_t token);
  bool AdmitsAtOnce(uint64_t token) const { return gate_.IsCurrent(token); }
  // From now on a session that is not here yet is Unavailable (DRAINING); those that are here go on.
  void BeginDrain() { serving_.BeginDrain(); }

  // --- inspection ------------------------------------------------------------------------------------------------
  std::vector<ShardSessionSummary> ListSessions() const;
  absl::StatusOr<std::vector<LayerStats>> GetLayerStats(absl::string_view session_name) const;
  std::vector<DeviceUse> devices() const { return DescribeDevices(*context_); }
  // For what is not a session's and takes of the same memory; may outlive the shard.
  std::shared_ptr<MemoryAccount> memory() const { return {context_, &context_->memory}; }
  // Gradients taken in and not yet answered, plus updates under way.
  int64_t in_flight() const { return context_->in_flight.load(std::memory_order_relaxed); }

 private:
  // Each uses only those before it.
  const std::shared_ptr<ShardContext> context_;
  ServingState serving_;
  FencingGate gate_;
  ShardSessions sessions_;
  ShardQuarantine quarantine_;
  SessionInstaller installer_;
  ShardReplay replay_;
  ShardDataPlane data_plane_;
  SnapshotRequests snapshots_;
  ShardUpkeep upkeep_;
};

}  // namespace precondor
