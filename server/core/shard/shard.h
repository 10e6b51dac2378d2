// SPDX-License-Identifier: Apache-2.0
// A shard: owns the layers of all sessions that are placed on one process, and processes the contributions to them. It
// knows gRPC, protobuf, devices and clocks only through the interfaces that it is given.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/core/api/shard_control.h"
#include "server/core/api/shard_summary.h"
#include "server/core/resources/shard_context.h"
#include "server/core/shard/fencing_gate.h"
#include "server/core/shard/session_installer.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/core/shard/shard_quarantine.h"
#include "server/core/shard/shard_replay.h"
#include "server/core/shard/shard_sessions.h"
#include "server/core/shard/shard_upkeep.h"
#include "server/core/shard/snapshot_requests.h"

namespace precondor {

// Composes the parts of a shard and serves the coordinator's calls. Each part serves one kind of caller; all parts use
// one table of sessions. Thread-safe.
class Shard final : public ShardControl {
 public:
  // All references must outlive the shard. The executor runs the arithmetic and keeps each layer's order of work.
  Shard(const ShardOptions& options, Backend& backend, Executor& executor, const Clock& clock, Logger& logger,
        Observer& observer);
  ~Shard() override;

  // Calls of workers.
  ShardDataPlane& data_plane() { return data_plane_; }
  // Restores the shard from its journal. Precondition: nothing else has been called on the shard.
  ShardReplay& replay() { return replay_; }
  // Snapshots on request, and restoring layers from a snapshot.
  SnapshotRequests& snapshots() { return snapshots_; }
  // Tasks to run periodically.
  ShardUpkeep& upkeep() { return upkeep_; }

  // --- ShardControl: the coordinator's calls; semantics and errors are in shard_control.h -------------------------
  absl::StatusOr<ShardDescription> Describe() override;
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override;
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override;
  absl::StatusOr<SnapshotProgress> TakeSnapshot(const SnapshotOrder& order) override;
  absl::StatusOr<bool> Remove(uint64_t session_id) override;
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override;
  // Admits one of the calls above, with the fencing token that it carries. The call runs while the pass is alive.
  // Returns UNAVAILABLE while the shard replays its journal, or the errors of FencingGate::Enter.
  absl::StatusOr<FencingGate::Pass> Admit(uint64_t token);
  // Returns whether Admit waits for neither a disk nor other calls.
  bool AdmitsAtOnce(uint64_t token) const { return gate_.IsCurrent(token); }
  // Refuses new sessions with UNAVAILABLE (DRAINING) from now on. Installed sessions continue.
  void BeginDrain() { serving_.BeginDrain(); }

  // --- inspection ------------------------------------------------------------------------------------------------
  std::vector<ShardSessionSummary> ListSessions() const;
  absl::StatusOr<std::vector<LayerStats>> GetLayerStats(absl::string_view session_name) const;
  DeviceUse device() const { return DescribeDevice(*context_); }
  // Returns the account that other users of the device's memory also charge. It may outlive the shard.
  std::shared_ptr<MemoryAccount> memory() const { return {context_, &context_->memory}; }
  // Returns the number of accepted gradients without an answer plus the number of unfinished updates.
  int64_t in_flight() const { return context_->in_flight.load(std::memory_order_relaxed); }

 private:
  // Each part uses only the parts before it.
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
