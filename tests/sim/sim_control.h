// SPDX-License-Identifier: Apache-2.0
// A coordinator's way to a shard. A call takes no time, as nothing else can happen while the coordinator waits for it;
// it may be lost on the way there or on the way back, or be given up on and take effect later all the same.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "server/core/api/shard_control.h"
#include "tests/sim/sim_shard.h"

namespace precondor::sim {

class SimCoordinator;

class SimControl final : public ShardControl {
 public:
  SimControl(World& world, SimCoordinator& from, SimShard& to) : world_(world), from_(from), to_(to) {}
  void BecomeLeader(uint64_t token) override { token_ = token; }
  absl::StatusOr<ShardDescription> Describe() override;
  absl::StatusOr<int64_t> Install(const SessionInstall& install) override;
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence) override;
  absl::StatusOr<bool> Remove(uint64_t session_id) override;
  absl::StatusOr<bool> Quarantine(uint64_t session_id) override;

 private:
  // Returns the result of `make` on the shard, or why it does not get there or back. A call that was only given up on
  // may arrive later.
  template <typename Result>
  Result Call(const std::function<Result(SimShard&)>& make);
  // Why the call does not get there. `late` is what it then does when it was only given up on.
  absl::Status GoThere(const std::function<void(SimShard&)>& late);
  absl::Status ComeBack() const;

  World& world_;
  SimCoordinator& from_;
  SimShard& to_;
  uint64_t token_ = 0;
};

}  // namespace precondor::sim
