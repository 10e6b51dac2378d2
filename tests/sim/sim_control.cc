// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/sim_control.h"

#include "kernels/base/status_macros.h"
#include "tests/sim/sim_coordinator.h"
#include "tests/sim/world.h"

namespace precondor::sim {

absl::Status SimControl::GoThere(const std::function<void(SimShard&)>& late) {
  if (!from_.MayAct()) return absl::CancelledError("the coordinator died");
  Process& shard = to_.process();
  if (!shard.up()) return absl::UnavailableError("connection refused");
  const bool lost = world_.random().Chance(world_.control_loss());
  if (!lost && shard.running() && !world_.network().clogged(from_.process(), shard)) return absl::OkStatus();
  if (world_.random().Chance(0.5)) {
    world_.network().Send(from_.process(), shard, [to = &to_, late] { late(*to); });
  }
  return absl::DeadlineExceededError("given up on");
}

absl::Status SimControl::ComeBack() const {
  const bool clogged = world_.network().clogged(to_.process(), from_.process());
  if (clogged || world_.random().Chance(world_.control_loss())) return absl::UnavailableError("lost on the way back");
  return absl::OkStatus();
}

absl::StatusOr<ShardDescription> SimControl::Describe() {
  PRECONDOR_RETURN_IF_ERROR(GoThere([](SimShard&) {}));
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return to_.Describe();
}

absl::StatusOr<ShardDescription> SimControl::Probe(const ShardLease& lease) {
  PRECONDOR_RETURN_IF_ERROR(GoThere([lease](SimShard& to) { (void)to.Probe(lease); }));
  absl::StatusOr<ShardDescription> description = to_.Probe(lease);
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return description;
}

absl::StatusOr<int64_t> SimControl::Install(const SessionInstall& install) {
  PRECONDOR_RETURN_IF_ERROR(GoThere([install](SimShard& to) { (void)to.Install(install); }));
  absl::StatusOr<int64_t> reserved = to_.Install(install);
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return reserved;
}

absl::StatusOr<std::optional<uint64_t>> SimControl::Fence(const EpochFence& fence) {
  PRECONDOR_RETURN_IF_ERROR(GoThere([fence](SimShard& to) { (void)to.Fence(fence); }));
  absl::StatusOr<std::optional<uint64_t>> gone = to_.Fence(fence);
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return gone;
}

absl::Status SimControl::HoldFactors(const FactorHold& hold) {
  PRECONDOR_RETURN_IF_ERROR(GoThere([hold](SimShard& to) { (void)to.HoldFactors(hold); }));
  absl::Status held = to_.HoldFactors(hold);
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return held;
}

absl::StatusOr<bool> SimControl::Remove(uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(GoThere([session_id](SimShard& to) { (void)to.Remove(session_id); }));
  absl::StatusOr<bool> existed = to_.Remove(session_id);
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return existed;
}

}  // namespace precondor::sim
