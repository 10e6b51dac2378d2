// SPDX-License-Identifier: Apache-2.0
// A session as the coordinator sees it: who holds each rank, which epoch it is, how far the leases reach. State and
// rules alone; talking to shards is the Coordinator's part.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/session_spec.h"
#include "server/core/coordinator.h"
#include "server/core/loss_table.h"
#include "server/core/shard_control.h"

namespace precondor {

// Not thread-safe: the Coordinator's lock guards it, but for id, spec, shard_map and layers_of_shard, which are const.
class CoordinatorSession {
 public:
  CoordinatorSession(uint64_t id, SessionSpec spec, std::vector<ShardAssignment> shard_map,
                     std::vector<std::vector<uint32_t>> layers_of_shard, uint64_t lease_steps);

  uint64_t id() const { return id_; }
  const SessionSpec& spec() const { return spec_; }
  uint64_t epoch() const { return epoch_; }
  uint32_t joined() const { return joined_; }
  bool active() const { return joined_ == incarnations_.size(); }
  const std::vector<ShardAssignment>& shard_map() const { return shard_map_; }
  const std::vector<std::vector<uint32_t>>& layers_of_shard() const { return layers_of_shard_; }

  // Takes the rank's place. True: the membership changed, and shards have to be told before the reply; so they have
  // while an earlier change has not been told (NoteShardsTold). Errors: InvalidArgument, NotFound UNKNOWN_RANK,
  // FailedPrecondition STALE_INCARNATION.
  absl::StatusOr<bool> Join(uint32_t rank, uint64_t incarnation);
  void NoteShardsTold(uint64_t epoch, uint32_t joined);
  // What each shard is to be told, in the coordinator's order; one without layers is told nothing.
  std::vector<SessionInstall> MakeInstalls() const;

  // Gives the rank's place back; whoever takes it next begins a new epoch. Errors as for Join.
  absl::Status Leave(uint32_t rank, uint64_t incarnation);

  // Takes a report in and extends the lease; the step's loss when this report completed it. Errors: NotFound
  // UNKNOWN_RANK, FailedPrecondition STALE_EPOCH or STALE_INCARNATION.
  absl::StatusOr<std::optional<LossTable::StepLoss>> Report(const StepReport& report);

  Directive directive() const;
  Mode mode() const;
  CoordinatorSessionSummary summary() const;

 private:
  absl::Status CheckHolder(uint32_t rank, uint64_t incarnation) const;
  void BeginEpoch();

  // Const after construction.
  const uint64_t id_;
  const SessionSpec spec_;
  const std::vector<ShardAssignment> shard_map_;
  const std::vector<std::vector<uint32_t>> layers_of_shard_;  // by shard of the coordinator
  const uint64_t lease_steps_;

  uint64_t epoch_ = 1;
  std::vector<uint64_t> incarnations_;  // by rank; 0: free
  std::vector<uint64_t> last_holders_;  // by rank; the greatest incarnation ever
  uint32_t joined_ = 0;
  bool shards_told_ = true;
  std::vector<ModeInterval> schedule_ = {{0, Mode::kSecondOrder}};
  uint64_t granted_through_ = 0;
  uint64_t last_step_ = 0;
  double last_loss_ = 0;
  LossTable losses_;
};

}  // namespace precondor
