// SPDX-License-Identifier: Apache-2.0
// The disk of a shard's machine, which outlives the process and fails, and the real store of server/recovery on it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/base/clock.h"
#include "server/recovery/shard_store.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_random.h"
#include "tests/support/fake_file_system.h"

namespace precondor::sim {

class World;

// What goes when a shard dies: its process; with its machine what was not synced; or a bit of the log is wrong as well.
enum class Loss { kProcess, kMachine, kMachineAndBit };

class SimShardDisk {
 public:
  SimShardDisk(World& world, Process& process, const Clock& clock, uint64_t seed);
  ~SimShardDisk();

  // A process begins: its journal, and what brings a shard with that journal back.
  ShardJournal* Open();
  absl::Status Restore(Shard& shard);
  // A new disk in place of one that has rotted.
  void Replace();
  bool damaged() const { return damaged_; }
  bool failing() const { return failing_; }
  // Ends what the process had of it.
  void Lose(Loss loss);
  // Whether the store has said that this session cannot come back.
  bool stale(uint64_t session_id) const { return store_ != nullptr && store_->log().stale(session_id); }

  // Until Mend: no more than so many bytes go on it; some operations fail; appends hold the process up.
  void Fill(uint64_t room_bytes);
  void Fail(double chance);
  void SlowDown(int64_t most_us) { delay_us_ = most_us; }
  void Mend();

 private:
  absl::Status Before(FakeFileSystem::Operation operation);
  void FlipABit();
  // PlantedBug::kChecksum: the same in an update, whose record then has the checksum of what it became.
  void FlipABitUnnoticed(const std::string& segment);
  // What a server does in the background.
  void Work();

  World& world_;
  Process& process_;
  const Clock& clock_;
  uint64_t seed_;
  std::unique_ptr<FakeFileSystem> fs_;
  std::unique_ptr<recovery::ShardStore> store_;
  bool damaged_ = false;
  bool failing_ = false;
  double failure_ = 0;
  int64_t delay_us_ = 0;
};

}  // namespace precondor::sim
