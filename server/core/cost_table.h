// SPDX-License-Identifier: Apache-2.0
// What layers have cost on this shard, by method and shape: the input of placement.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

// Name and options of a method in one canonical line: equal configurations have equal texts.
std::string MethodText(const MethodConfig& config);

// Thread-safe. Outlives sessions, so that the next session's placement knows what the last one measured.
class CostTable {
 public:
  // Index of an entry, for the calls below; the same method and shape give the same one.
  size_t Register(const std::string& method, int64_t d_out, int64_t d_in);
  void RecordUpdate(size_t entry, double seconds);
  void RecordPrecondition(size_t entry, double seconds);
  // Of work that an update had deferred.
  void RecordDeferred(size_t entry, double seconds);
  // Entries with a measurement. A step is one precondition; where there were only updates, one update.
  std::vector<MeasuredCost> Snapshot() const;

 private:
  struct Entry {
    MeasuredCost cost;
    double seconds = 0;
    uint64_t updates = 0;
    uint64_t preconditions = 0;
  };
  mutable Mutex mu_;
  absl::flat_hash_map<std::tuple<std::string, int64_t, int64_t>, size_t> index_ ABSL_GUARDED_BY(mu_);
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
