// SPDX-License-Identifier: Apache-2.0
// The disk of a shard's machine, which outlives the process and fails, and the real store of server/recovery on it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "kernels/base/clock.h"
#include "server/recovery/shard_store.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_random.h"
#include "tests/support/fake_file_system.h"

namespace precondor::sim {

class World;

// A shard's death: its process goes; with its machine also all that was not synced; or a bit of the log is wrong as
// well.
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
  bool has_failed() const { return failed_; }  // since the process began
  // Ends what the process had of it.
  void Lose(Loss loss);
  // Whether the store has said that this session cannot come back as it is.
  bool stale(uint64_t session_id) const { return store_ != nullptr && !store_->HoldsAllOf(session_id); }
  // Writes the snapshots that wait.
  void WriteSnapshots();
  // The process dies right after its `count`th write from now on: `died` is called, amid the store's work, and nothing
  // more gets to the disk. `lacks`: the store may lack what others had been told.
  void DieAfter(uint64_t count, std::function<void(bool lacks)> died);

  // Until Mend: no more than so many bytes go on it; some operations fail; appends hold the process up.
  void Fill(uint64_t room_bytes);
  void Fail(double chance);
  void SlowDown(int64_t most_us) { delay_us_ = most_us; }
  void Mend();

 private:
  struct Gaps final : StoreObserver {
    void OnLogStale(absl::string_view, bool stale) override { log = stale; }
    void OnGradientsMissing(absl::string_view, bool missing) override { gradients = missing; }
    bool log = false;
    bool gradients = false;
  };
  absl::Status Before(FakeFileSystem::Operation operation, const std::string& path);
  void FlipABit();
  // PlantedBug::kChecksum: the same in an update, whose record then has the checksum of what it became.
  void FlipABitUnnoticed(const std::string& segment);
  // Does a server's work in the background.
  void Work();
  void WorkOnGradients();

  World& world_;
  Process& process_;
  const Clock& clock_;
  uint64_t seed_;
  std::unique_ptr<FakeFileSystem> fs_;
  Gaps gaps_;  // as the store has told of them
  std::unique_ptr<recovery::ShardStore> store_;
  bool damaged_ = false;
  bool failing_ = false;
  bool failed_ = false;
  double failure_ = 0;
  int64_t delay_us_ = 0;
  uint64_t writes_left_ = 0;  // 0: it does not die
  std::function<void(bool lacks)> died_;
  bool dead_ = false;
};

}  // namespace precondor::sim
