// SPDX-License-Identifier: Apache-2.0
// Measured costs of layers on this shard, by method and shape: the input of placement.
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

// Returns name and options of a method in one canonical line. Equal configurations have equal texts.
std::string MethodText(const MethodConfig& config);

// Collects the measured costs of layers. Thread-safe. Outlives sessions, so that the next session's placement uses the
// measurements of earlier ones.
class CostTable {
 public:
  // Returns the index of an entry, for the calls below. Equal methods and shapes give equal indices.
  size_t Register(const std::string& method, int64_t d_out, int64_t d_in);
  void RecordUpdate(size_t entry, double seconds);
  void RecordPrecondition(size_t entry, double seconds);
  // Records the time of work that an update deferred.
  void RecordDeferred(size_t entry, double seconds);
  // Returns the entries that have a measurement. A step counts as one precondition, or as one update if the entry has
  // only updates.
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
