// SPDX-License-Identifier: Apache-2.0
// One rank of the simulated job: sends, waits, sends again, joins anew when its epoch has passed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "server/core/contribution.h"
#include "server/core/coordinator.h"

namespace precondor::sim {

class World;

// Belongs to a World. Whatever is still on the network when the worker dies goes to nobody.
class SimWorker {
 public:
  // Goes on from a checkpoint: its step, and the epoch in which it was written.
  SimWorker(World& world, uint32_t rank, uint64_t incarnation, uint64_t first_step, uint64_t epoch)
      : world_(world),
        rank_(rank),
        incarnation_(incarnation),
        first_step_(first_step),
        known_epoch_(epoch),
        step_(first_step) {}

  void Start();
  bool done() const { return done_; }
  uint64_t known_epoch() const { return known_epoch_; }
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
  void Repeat();
  void SendJoin();
  void OnJoined(const JoinResult& joined);
  void BeginStep();
  void Transmit(PendingKey which);
  void OnAck(uint64_t epoch, uint64_t step, PendingKey which, const absl::StatusOr<bool>& ack);
  void OnResult(uint64_t epoch, uint64_t step, PendingKey which, const absl::StatusOr<GradientResult>& result);
  void OnError(const absl::Status& status);
  void FinishStepIfComplete();
  void SendReport();

  World& world_;
  const uint32_t rank_;
  const uint64_t incarnation_;
  const uint64_t first_step_;
  bool stale_ = true;  // has to join before it goes on
  bool done_ = false;
  uint64_t known_epoch_ = 0;  // what it or the checkpoint has seen
  uint64_t epoch_ = 0;        // joined
  uint64_t generation_ = 0;   // the epoch that last went back
  uint64_t session_ = 0;
  uint64_t step_ = 0;
  bool reporting_ = false;
  std::map<PendingKey, Pending> pending_;
};

}  // namespace precondor::sim
