// SPDX-License-Identifier: Apache-2.0
// Periodic tasks of a shard. A server calls each of them at intervals.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "server/core/shard/shard_quarantine.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe.
class ShardUpkeep {
 public:
  // All references must outlive the object.
  ShardUpkeep(ShardContext& shard, const ShardSessions& sessions, ShardQuarantine& quarantine)
      : shard_(shard), sessions_(sessions), quarantine_(quarantine) {}

  // For the end of a drain: writes a snapshot of the layers, as they are, of each session whose methods learn from
  // gradients or whose journal lacks something, and waits until it is durable, or until `deadline` on the monotonic
  // clock. Returns the names of the sessions that a restart cannot bring back as they are. Precondition: no work is in
  // flight.
  std::vector<std::string> WriteFinalSnapshots(absl::Time deadline);
  // Its halves, for callers whose executor and journal have no threads: gives the images to the journal and returns how
  // many are still to come; and tells, once the journal has written them, which sessions a restart cannot bring back.
  std::shared_ptr<const std::atomic<size_t>> GiveFinalImages();
  std::vector<std::string> FindIncomplete() const;
  // See ShardQuarantine::Complete.
  void CompleteQuarantine() { quarantine_.Complete(); }
  // Logs and reports the ranks that other ranks wait for, if they have changed.
  void ReportStragglers();
  // Returns whether a fault has made the device unusable, and reports it once to observer and log. Layers are then
  // answered IDENTITY or with errors.
  bool LostDevice();

 private:
  ShardContext& shard_;
  const ShardSessions& sessions_;
  ShardQuarantine& quarantine_;

  std::atomic<bool> lost_ = false;  // and reported
};

}  // namespace precondor
