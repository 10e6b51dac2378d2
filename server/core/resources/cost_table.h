// SPDX-License-Identifier: Apache-2.0
// Measured costs of layers on this shard, by method and shape: the input of placement.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/shard_control.h"

namespace precondor {

// Returns name and options of a method in one canonical line. Equal configurations have equal texts.
std::string MethodText(const MethodConfig& config);

// Collects the measured costs of layers. Thread-safe. Outlives sessions, so that the next session's placement uses the
// measurements of earlier ones.
class CostTable {
 public:
  // Sessions choose methods and shapes: of more of them, those that have not been registered for longest are forgotten.
  static constexpr size_t kMostEntries = 1024;

  struct Entry {
    MeasuredCost cost;
    double seconds = 0;
    uint64_t updates = 0;
    uint64_t preconditions = 0;
    uint64_t registered = 0;  // the last registration's number
  };
  // Returns an entry for the calls below, which alone read and write it. Equal methods and shapes share one while the
  // table has it.
  std::shared_ptr<Entry> Register(const std::string& method, int64_t d_out, int64_t d_in);
  void RecordUpdate(Entry& entry, double seconds);
  void RecordPrecondition(Entry& entry, double seconds);
  // Records the time of work that an update deferred.
  void RecordDeferred(Entry& entry, double seconds);
  // Returns the entries that have a measurement. A step counts as one precondition, or as one update if the entry has
  // only updates.
  std::vector<MeasuredCost> Snapshot() const;

 private:
  mutable Mutex mu_;  // of the entries too
  uint64_t registrations_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::tuple<std::string, int64_t, int64_t>, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
