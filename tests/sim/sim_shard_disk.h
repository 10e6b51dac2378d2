// SPDX-License-Identifier: Apache-2.0
// A shard's journal on a disk that outlives it: the real log and snapshots over a file system in memory that loses what
// was not synced. Records are in the log by number, with the bytes of their votes; what else is in them is kept beside
// it, as their encoding is tested elsewhere.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/core/shard.h"
#include "server/core/shard_journal.h"
#include "server/store/record_log.h"
#include "server/store/snapshot_store.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_random.h"
#include "tests/support/fake_file_system.h"

namespace precondor::sim {

// What goes when a shard dies: its process; with its machine what was not synced; or a bit of the log is wrong as well.
enum class Loss { kProcess, kMachine, kMachineAndBit };

class SimShardDisk final : public ShardJournal {
 public:
  // `verify`: check the log's checksums.
  SimShardDisk(Process& process, Random& random, uint64_t seed, bool verify);
  ~SimShardDisk() override;

  void Lose(Loss loss);
  // Brings a new shard back from what is there.
  absl::Status Restore(Shard& shard);
  // What a server does in the background.
  void Sync();

  void Append(const ShardRecord& record) override;
  void Keep(LayerImage image) override;

 private:
  struct Gathering {
    uint64_t install = 0;   // the number of its record
    uint64_t sequence = 0;  // of the log, when the first image came
    std::map<uint32_t, uint64_t> images;
  };
  std::string Encode(const ShardRecord& record);
  absl::StatusOr<ShardRecord> Decode(absl::string_view payload) const;
  void FlipABit();
  void MakeDisk();
  absl::Status OpenStores(const store::RecordLog::Replay& replay);
  void Replay(Shard& shard, ShardRecord record);
  absl::Status RestoreSnapshot(Shard& shard);
  void Write(const Gathering& gathering);

  Process& process_;
  Random& random_;
  const bool verify_;
  uint64_t seed_;
  std::unique_ptr<FakeFileSystem> fs_;
  std::vector<ShardRecord> records_;  // all ever, by number
  std::vector<LayerImage> images_;
  std::unique_ptr<store::RecordLog> log_;
  std::unique_ptr<store::SnapshotStore> snapshots_;
  std::optional<uint64_t> install_;          // the last install's number
  std::map<uint64_t, Gathering> gathering_;  // by cut
  bool damaged_ = false;
  uint64_t last_snapshot_ = 0;
  uint64_t last_sequence_ = 0;  // of the snapshot before
};

}  // namespace precondor::sim
