// SPDX-License-Identifier: Apache-2.0
// One process in a rank of the simulated job: sends, waits, sends again, joins anew when its epoch has passed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/core/contribution.h"
#include "server/core/coordinator.h"
#include "tests/sim/checkpoints.h"
#include "tests/sim/oracle.h"
#include "tests/sim/process.h"

namespace precondor::sim {

class World;

// Lives in `process`, one life long. Everything that has to outlive it is in the checkpoints.
class SimWorker {
 public:
  SimWorker(World& world, Process& process, Checkpoints& checkpoints, uint32_t rank, uint64_t incarnation);

  void Start();
  bool done() const { return done_; }
  uint64_t generation() const { return generation_; }
  uint64_t step() const { return step_; }
  uint64_t incarnation() const { return incarnation_; }
  std::string Describe() const;  // for messages

 private:
  struct Pending {
    bool acknowledged = false;
    bool answered = false;  // statistics need no answer
  };
  using PendingKey = std::pair<ContributionKind, uint32_t>;  // kind, layer

  void Tick();
  void SendJoin();
  void OnJoined(const JoinResult& joined);
  void GoBack(uint64_t step);
  void Adopt(const Directive& directive);
  // Begins step_ when the lease allows it.
  void BeginStep();
  void Transmit(PendingKey which);
  ContributionHeader HeaderOf(PendingKey which, const Part& part) const;
  bool Current(const ContributionKey& key) const;
  void OnAck(const ContributionKey& key, PendingKey which, const absl::StatusOr<bool>& ack);
  void OnResult(const ContributionKey& key, PendingKey which, const absl::StatusOr<GradientResult>& result);
  void OnError(const absl::Status& status);
  void FinishStepIfComplete();
  void SendReport();
  void OnReported(uint64_t epoch, uint64_t step, const absl::StatusOr<Directive>& directive);

  World& world_;
  Process& process_;
  Checkpoints& checkpoints_;
  const uint32_t rank_;
  const uint64_t incarnation_;
  const uint64_t first_step_;

  bool stale_ = true;   // has to join before it goes on
  bool begun_ = false;  // step_ has begun
  bool done_ = false;
  uint64_t epoch_ = 0;       // joined
  uint64_t generation_ = 0;  // the epoch that last went back
  uint64_t session_ = 0;
  uint64_t step_ = 0;
  Mode mode_ = Mode::kSecondOrder;
  uint64_t lease_ = 0;
  std::vector<ModeInterval> modes_;
  std::deque<uint64_t> owed_;  // steps to report
  std::map<PendingKey, Pending> pending_;
};

}  // namespace precondor::sim
