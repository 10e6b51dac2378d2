// SPDX-License-Identifier: Apache-2.0
// A shard process: the real Shard, its executor, and the witnesses that watch it. Dies with all that is in memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "server/core/shard/shard.h"
#include "tests/sim/layer_witness.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_clock.h"
#include "tests/sim/sim_executor.h"
#include "tests/sim/sim_method.h"
#include "tests/sim/sim_shard_disk.h"

namespace precondor::sim {

class World;

class SimShard {
 public:
  SimShard(World& world, uint32_t id, ShardOptions options, Backend& backend);
  ~SimShard();

  Process& process() { return process_; }
  const Process& process() const { return process_; }
  SimClock& clock() { return clock_; }
  SimShardDisk& disk() { return disk_; }
  void Start();
  // Dies, and starts again after a while with an empty disk.
  void Forget(int64_t down_us);
  // Dies, and starts again after a while.
  void Kill(Loss loss, int64_t down_us);
  // The same in the middle of something: after its `writes`th write.
  void KillAfterWrites(uint64_t writes, int64_t down_us);
  // Ends as a server does that is told to: what is in flight ends within `patience_us`, and the factors are written.
  void Drain(int64_t patience_us, int64_t down_us);

  // Whether it takes streams.
  bool serving() const { return shard_->data_plane().CheckServing().ok(); }
  // As ExchangeStream asks: of a stream when it begins, and of each frame of it.
  uint64_t generation() const { return shard_->data_plane().state_generation(); }
  bool IsOf(uint64_t session_id, uint64_t generation) const {
    return shard_->data_plane().CheckGeneration(session_id, generation).ok();
  }
  // As a frame arrives; `ack` and `result` see what the shard says before the network does.
  void Deliver(const ContributionHeader& header, Payload payload, const AckFn& ack, const ResultFn& result);

  void DeliverFetch(const ContributionKey& key, const ResultFn& result);
  absl::StatusOr<uint64_t> DeliverResume(const RankResume& resume);

  // As a call of the coordinator's arrives; each has to be admitted.
  absl::StatusOr<FencingGate::Pass> Admit(uint64_t token) { return shard_->Admit(token); }
  absl::StatusOr<ShardDescription> Describe() { return shard_->Describe(); }
  absl::StatusOr<int64_t> Install(const SessionInstall& install);
  absl::StatusOr<std::optional<uint64_t>> Fence(const EpochFence& fence);
  absl::StatusOr<bool> Remove(uint64_t session_id);
  absl::StatusOr<bool> Quarantine(uint64_t session_id);

  // Whether the layer was ever in that state here.
  bool Had(const std::string& layer, const MethodState& state) const;

  // Returns what is left once every session has ended (I6), or "".
  std::string Leftovers() const;

 private:
  void Tick();
  // Its process's memory goes.
  void End();
  // `losing`: with what others had been told.
  void Die(Loss loss, bool losing, int64_t down_us);
  // A new process's shard, from its disk.
  absl::Status Restore();
  void LoseFences();
  LayerWitness& witness(uint32_t layer) { return *witnesses_.at(layer); }
  LayerWitness& witness(const std::string& layer);
  // Makes the witnesses of layers that it is about to get.
  void MakeWitnesses(const SessionInstall& install);
  void ForEachWitness(const std::function<void(LayerWitness&)>& visit);
  std::string CheckCounted(const ContributionHeader& header, const absl::StatusOr<bool>& taken);
  // PlantedBug::kFence and kSeal: the header as it arrives, and an abstention of the next rank.
  ContributionHeader Renewed(const ContributionHeader& header) const;
  void Forge(const ContributionHeader& header);

  World& world_;
  Process process_;
  SimClock clock_;
  Backend& backend_;
  MethodEvents events_;
  ShardOptions options_;
  SimShardDisk disk_;
  std::set<uint32_t> owned_;                                     // layers
  std::map<uint32_t, uint64_t> holders_;                         // of ranks, as last installed: incarnations
  std::map<uint32_t, std::unique_ptr<LayerWitness>> witnesses_;  // of the layers that it has or had
  std::unique_ptr<SimExecutor> executor_;
  std::unique_ptr<Shard> shard_;
  uint64_t fenced_ = 0;     // no contribution of an earlier epoch may count (I1)
  uint64_t installed_ = 0;  // of that, what it knows when it comes back
  bool fences_may_be_lost_ = false;
  bool dying_ = false;  // what its process had goes in a moment
};

}  // namespace precondor::sim
