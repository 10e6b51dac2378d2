// SPDX-License-Identifier: Apache-2.0
// The coordinator's process: the real Coordinator on a journal that outlives it. It can be made to die between any two
// of the things it does to the world: a record written, a shard told.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/core/coordinator/coordinator.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_clock.h"
#include "tests/sim/sim_journal.h"
#include "tests/sim/sim_shard.h"

namespace precondor::sim {

class SimCoordinator {
 public:
  SimCoordinator(World& world, uint32_t id, CoordinatorOptions options);
  ~SimCoordinator();

  Process& process() { return process_; }
  SimClock& clock() { return clock_; }
  SimJournal& journal() { return journal_; }
  // Not before it is up for the first time.
  Coordinator& core() { return *core_; }

  // A process that goes on from the journal.
  void Start();
  // Dies once it has done `actions` more things to the world, or after `patience_us` if it has nothing to do.
  void DieAfter(uint64_t actions, int64_t patience_us);
  // Whether it may do one more.
  bool MayAct();

 private:
  class Disk;  // the journal as this life sees it
  void DoNotStart(const absl::Status& why);
  void Tick();

  World& world_;
  Process process_;
  SimClock clock_;
  SimJournal journal_;
  const CoordinatorOptions options_;
  std::unique_ptr<Disk> disk_;
  std::unique_ptr<Coordinator> core_;
  bool doomed_ = false;
  uint64_t actions_left_ = 0;
};

}  // namespace precondor::sim
