// SPDX-License-Identifier: Apache-2.0
// The coordinator's journal on a disk that survives it. A write may fail, and then the record may be there or not.
#pragma once

#include <vector>

#include "server/core/coordinator_journal.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {

class SimJournal final : public CoordinatorJournal {
 public:
  explicit SimJournal(Random& random) : random_(random) {}

  absl::Status Append(const CoordinatorRecord& record) override {
    if (full_) return absl::ResourceExhaustedError("no space left");
    if (!random_.Chance(failure_)) {
      records_.push_back(record);
      return absl::OkStatus();
    }
    if (random_.Chance(0.5)) records_.push_back(record);
    return absl::UnavailableError("the disk failed");
  }
  absl::Status Compact(absl::Span<const CoordinatorRecord> records) override {
    if (full_ || random_.Chance(failure_)) return absl::UnavailableError("the disk failed");
    records_.assign(records.begin(), records.end());
    return absl::OkStatus();
  }
  bool wants_compaction() const override { return records_.size() > 8; }

  const std::vector<CoordinatorRecord>& records() const { return records_; }
  void set_full(bool full) { full_ = full; }
  void set_failure(double chance) { failure_ = chance; }

 private:
  Random& random_;
  std::vector<CoordinatorRecord> records_;
  bool full_ = false;
  double failure_ = 0;
};

}  // namespace precondor::sim
