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

template <typename Result>
Result SimControl::Call(const std::function<Result(SimShard&)>& make) {
  const auto admitted = [make, token = token_](SimShard& to) -> Result {
    PRECONDOR_ASSIGN_OR_RETURN(const FencingGate::Pass pass, to.Admit(token));
    return make(to);
  };
  PRECONDOR_RETURN_IF_ERROR(GoThere([admitted](SimShard& to) { (void)admitted(to); }));
  Result result = admitted(to_);
  if (!to_.process().up()) return absl::UnavailableError("the shard died");
  PRECONDOR_RETURN_IF_ERROR(ComeBack());
  return result;
}

absl::StatusOr<ShardDescription> SimControl::Describe() {
  return Call<absl::StatusOr<ShardDescription>>([](SimShard& to) { return to.Describe(); });
}

absl::StatusOr<int64_t> SimControl::Install(const SessionInstall& install) {
  return Call<absl::StatusOr<int64_t>>([install](SimShard& to) { return to.Install(install); });
}

absl::StatusOr<std::optional<uint64_t>> SimControl::Fence(const EpochFence& fence) {
  return Call<absl::StatusOr<std::optional<uint64_t>>>([fence](SimShard& to) { return to.Fence(fence); });
}

absl::StatusOr<bool> SimControl::Remove(uint64_t session_id) {
  return Call<absl::StatusOr<bool>>([session_id](SimShard& to) { return to.Remove(session_id); });
}

absl::StatusOr<bool> SimControl::Quarantine(uint64_t session_id) {
  return Call<absl::StatusOr<bool>>([session_id](SimShard& to) { return to.Quarantine(session_id); });
}

}  // namespace precondor::sim
