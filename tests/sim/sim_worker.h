// SPDX-License-Identifier: Apache-2.0
// One process in a rank of the simulated job: sends, waits, sends again, joins anew when its epoch has passed.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
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
  // A contribution of any step.
  struct Sent {
    uint64_t step = 0;
    Mode mode = Mode::kSecondOrder;
    PendingKey which;
    auto operator<=>(const Sent&) const = default;
  };

  void Tick();
  void SendJoin();
  void OnJoined(const JoinResult& joined);
  void GoBack(uint64_t step);
  void Adopt(const Directive& directive);
  // Begins step_ when the lease allows it.
  void BeginStep();
  void Transmit(const Sent& sent);
  ContributionHeader HeaderOf(const Sent& sent, const Part& part) const;
  // Shards that were lost do not know what they had gathered: it is kept for as long as another rank may need it.
  void AskForLives();
  void OnLife(uint32_t layer, uint64_t life);
  void KeepStep();
  bool Current(const ContributionKey& key) const;
  void OnAck(const ContributionKey& key, const Sent& sent, uint64_t life, const absl::StatusOr<bool>& ack);
  void OnAckOfKept(const Sent& sent, const absl::Status& ack);
  void OnResult(const ContributionKey& key, PendingKey which, uint64_t life,
                const absl::StatusOr<GradientResult>& result);
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
  std::map<uint32_t, uint64_t> lives_;  // of the shards, by layer
  std::set<Sent> kept_;
  std::set<Sent> again_;  // of those, on their way once more
};

}  // namespace precondor::sim
