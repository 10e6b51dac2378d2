// SPDX-License-Identifier: Apache-2.0
// A whole job in one thread: shards, coordinator, workers and the network between them, with the invariants that must
// hold whatever the seed does (docs/develop/testing.md).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "server/core/api/observer.h"
#include "tests/sim/checkpoints.h"
#include "tests/sim/event_queue.h"
#include "tests/sim/job.h"
#include "tests/sim/network.h"
#include "tests/sim/oracle.h"
#include "tests/sim/process.h"
#include "tests/sim/scenario.h"
#include "tests/sim/sim_coordinator.h"
#include "tests/sim/sim_random.h"
#include "tests/sim/sim_shard.h"
#include "tests/sim/sim_worker.h"
#include "tests/sim/trace.h"

namespace precondor::sim {

class World {
 public:
  // Keeps the last `trace_lines` of what happened.
  World(Scenario scenario, size_t trace_lines);
  ~World();

  // Runs to the end: every rank through every step, then the session closed. What went against an invariant, or "".
  std::string Run();
  std::string trace_tail() const { return trace_.Tail(); }

  // --- for its parts -------------------------------------------------------------------------------------------------
  const Scenario& scenario() const { return scenario_; }
  const SessionSpec& spec() const { return scenario_.spec; }
  const Oracle& oracle() const { return oracle_; }
  EventQueue& queue() { return queue_; }
  Network& network() { return network_; }
  Random& random() { return random_; }
  Trace& trace() { return trace_; }
  Logger& logger() { return logger_; }
  Observer& observer() { return observer_; }
  Job& job() { return job_; }
  SimCoordinator& coordinator() { return *coordinator_; }
  std::vector<std::unique_ptr<SimShard>>& shards() { return shards_; }
  SimShard& ShardAt(const std::string& address);
  uint32_t ranks() const { return static_cast<uint32_t>(scenario_.spec.world_size); }
  double control_loss() const { return healed_ ? 0 : scenario_.control_loss; }
  // Whether some shard has had the layer in that state.
  bool KnowsState(const std::string& layer, const MethodState& state) const;
  // Every rank has begun the step, or has come past it.
  bool AllReached(uint64_t generation, uint64_t step) const;
  std::string NoteMode(uint64_t step, Mode mode) { return job_.NoteMode(step, mode); }
  // A shard has forgotten all of the session, or set it aside.
  void OnRemoved(const SimShard& shard);
  void OnQuarantined(const SimShard& shard);
  // "" is no failure; the first one stays.
  void Fail(const std::string& what);

  // --- for faults ----------------------------------------------------------------------------------------------------
  std::vector<Process*> Processes();
  // A machine has lost what others had been told: from now on answers may differ from earlier ones.
  void BeInexact() { job_.BeInexact(); }
  bool opened() const { return session_id_ != 0; }
  uint64_t session_id() const { return session_id_; }
  bool healed() const { return healed_; }
  // Killed now, started again after a while from the checkpoint `back` steps before its last.
  void RestartRank(uint32_t rank, uint64_t back, int64_t down_us);
  void RestartCoordinator();
  // A rank has been told that the others cannot get the answers that it has had: soon all begin again, together.
  void LoseJob();
  // It has happened: what former processes sent to later steps still counts, so that a step can be passed by one rank
  // and never be complete again (docs/develop/adr/0023, seed 308528).
  bool has_begun_again() const { return has_begun_again_; }
  void AskForMode(std::optional<Mode> mode);

 private:
  struct Rank {
    std::unique_ptr<Process> process;
    std::unique_ptr<Checkpoints> checkpoints;
    std::unique_ptr<SimWorker> worker;
    uint64_t incarnation = 0;
  };

  void MakeShards();
  void StartRank(uint32_t rank);
  void Open();
  void Heal();
  // Runs events until `finished` or a failure. I7: within `limit_us` of the present.
  void RunUntil(const std::function<bool()>& finished, int64_t limit_us, const std::string& what);
  bool AllDone() const;
  void CloseAndCheckLeaks();
  std::string DescribeRanks() const;

  const Scenario scenario_;
  const Oracle oracle_;
  // Outlives the events, which may hold the last references to a layer's state.
  std::unique_ptr<Backend> backend_;
  Random random_;
  EventQueue queue_;
  Trace trace_;
  Network network_;
  NullLogger logger_;
  Observer observer_;
  Job job_;
  const MethodEvents no_events_;  // the coordinator makes no state
  std::vector<std::unique_ptr<SimShard>> shards_;
  std::unique_ptr<SimCoordinator> coordinator_;
  std::vector<Rank> ranks_;
  std::vector<std::unique_ptr<SimWorker>> dead_;  // events may still name them
  uint64_t session_id_ = 0;
  bool job_lost_ = false;
  bool has_begun_again_ = false;
  bool closing_ = false;
  bool healed_ = false;
  uint64_t events_ = 0;
  std::string failure_;
};

// "layer 2 rank 1 step 7 epoch 3 STATISTICS".
std::string KeyText(const ContributionHeader& header);

}  // namespace precondor::sim
