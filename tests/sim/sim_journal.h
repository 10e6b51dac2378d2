// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal: the real log of server/store on a disk that outlives the process, and fails.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/recovery/coordinator_log.h"
#include "tests/sim/sim_random.h"
#include "tests/support/fake_file_system.h"

namespace precondor::sim {

class SimJournal final : public CoordinatorJournal {
 public:
  SimJournal(Random& random, uint64_t seed);

  // The process that had the journal has died, with its `machine` or without; another one begins with the records kept.
  absl::StatusOr<std::vector<CoordinatorRecord>> Reopen(bool machine);
  // An error of Reopen is what the disk is to blame for.
  bool failing() const { return full_ || failure_ > 0; }

  absl::Status Append(const CoordinatorRecord& record) override { return log_->Append(record); }
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override { return log_->Compact(records); }
  bool wants_compaction() const override { return log_->wants_compaction(); }

  void set_full(bool full);
  void set_failure(double chance) { failure_ = chance; }  // of each write and sync

 private:
  Random& random_;
  FakeFileSystem fs_;
  std::unique_ptr<recovery::CoordinatorLog> log_;
  bool full_ = false;
  double failure_ = 0;
};

}  // namespace precondor::sim
