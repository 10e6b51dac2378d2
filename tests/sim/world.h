// SPDX-License-Identifier: Apache-2.0
// A whole job in one thread: shards, coordinator, workers and the network between them, with the invariants that must
// hold whatever the seed does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/log.h"
#include "server/core/coordinator.h"
#include "server/core/shard.h"
#include "tests/sim/event_queue.h"
#include "tests/sim/network.h"
#include "tests/sim/oracle.h"
#include "tests/sim/sim_executor.h"
#include "tests/sim/sim_random.h"
#include "tests/sim/sim_worker.h"
#include "tests/support/fake_method.h"

namespace precondor::sim {

// Everything about a run, drawn from its seed.
struct Scenario {
  uint64_t seed = 0;
  SessionSpec spec;
  int shards = 1;
  uint64_t steps = 0;
  NetworkFaults faults;
  double control_faults = 0;  // chance that a coordinator's call to a shard fails, before or after taking effect
  double trouble = 0;         // see Oracle
  int restarts = 0;           // workers killed and started again
};
Scenario MakeScenario(uint64_t seed);

class World {
 public:
  explicit World(Scenario scenario);
  ~World();

  // Runs to the end: every rank through every step, then the session closed. What went against an invariant, or "".
  std::string Run();

  // --- for workers ---------------------------------------------------------------------------------------------------
  const Scenario& scenario() const { return scenario_; }
  const SessionSpec& spec() const { return scenario_.spec; }
  const Oracle& oracle() const { return oracle_; }
  Coordinator& coordinator() { return *coordinator_; }
  EventQueue& queue() { return queue_; }
  Network& network() { return network_; }
  Random& random() { return random_; }
  bool Alive(uint32_t rank, uint64_t incarnation) const;
  SimWorker& worker(uint32_t rank) { return *workers_[rank]; }

  // A generation is a run of epochs without the job going back: what was decided in one holds in all.
  void NoteGeneration(uint64_t epoch, uint64_t generation) { generations_[epoch] = generation; }
  // At the shard, as a frame arrives there; `ack` and `result` see what the shard says before the network does.
  void Deliver(const ContributionHeader& header, const Part& part, AckFn ack, ResultFn result);
  // DELEGATE: the job passes its answers on. True when every layer of the step has one.
  bool AllAnswered(uint64_t generation, uint64_t step) const;
  // DELEGATE: every rank has begun the step.
  bool AllReached(uint64_t generation, uint64_t step) const;
  void Fail(const std::string& what);

 private:
  using PlanKey = std::tuple<uint64_t, uint64_t, uint32_t>;                               // generation, step, layer
  using CountKey = std::tuple<uint64_t, uint64_t, uint32_t, uint32_t, ContributionKind>;  // ..., rank, kind
  class FlakyControl;

  std::string DescribeWorkers() const;
  void ScheduleRestarts();
  void RestartWorker(uint32_t rank);
  void CheckPlan(const ContributionKey& key, const GradientResult& result);
  void CheckValues(const ContributionKey& key, const GradientResult& result);
  void CheckUpdates();
  uint64_t UpdatesThrough(uint64_t step, uint32_t layer) const;
  void CloseAndCheckLeaks();

  const Scenario scenario_;
  const Oracle oracle_;
  // Outlives the events, which may hold the last references to a layer's state.
  std::unique_ptr<Backend> backend_;
  Random random_;
  EventQueue queue_;
  Network network_;
  SimExecutor executor_;
  NullLogger logger_;
  Observer observer_;
  std::shared_ptr<FakeMethodLog> log_ = std::make_shared<FakeMethodLog>();
  std::vector<std::unique_ptr<Shard>> shards_;
  NullCoordinatorJournal journal_;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<std::unique_ptr<SimWorker>> workers_;
  std::vector<std::unique_ptr<SimWorker>> dead_;
  std::vector<uint32_t> shard_of_layer_;
  std::map<uint64_t, uint64_t> generations_;  // by epoch
  std::map<PlanKey, GradientResult> plans_;
  std::set<CountKey> counted_;
  bool closing_ = false;  // the job is over: nobody listens any more
  std::string failure_;
};

}  // namespace precondor::sim
