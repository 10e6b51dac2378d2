// SPDX-License-Identifier: Apache-2.0
// What a shard does as time passes. A server calls each of these every now and then.
#pragma once

#include <cstddef>
#include <set>
#include <string>

#include "kernels/base/mutex.h"
#include "server/core/shard/shard_quarantine.h"
#include "server/core/shard/shard_sessions.h"

namespace precondor {

// Thread-safe; mu_ is a leaf.
class ShardUpkeep {
 public:
  // All references outlive it.
  ShardUpkeep(ShardContext& shard, const ShardSessions& sessions, ShardQuarantine& quarantine)
      : shard_(shard), sessions_(sessions), quarantine_(quarantine) {}

  // Seals what ShardOptions::statistics_deadline has passed for.
  void SealOverdue();
  // Gives the memory of released factors back that have become durable.
  void FreeReleasedFactors();
  // Writes sessions down as quarantined whose work has ended, and deletes those whose time is over.
  void CompleteQuarantine() { quarantine_.Complete(); }
  // Logs and reports which workers hold the others up, when that has changed.
  void ReportStragglers();
  // Devices that faults have ended the use of; of each, observer and log hear once. Layers on one are answered IDENTITY
  // or with errors.
  size_t CountLostDevices();

 private:
  ShardContext& shard_;
  const ShardSessions& sessions_;
  ShardQuarantine& quarantine_;

  Mutex mu_;
  std::set<std::string> lost_devices_ ABSL_GUARDED_BY(mu_);  // by name, as reported
};

}  // namespace precondor
