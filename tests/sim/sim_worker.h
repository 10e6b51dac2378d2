// SPDX-License-Identifier: Apache-2.0
// One process in a rank of the simulated job: sends, waits, sends again, joins anew when its epoch has passed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/src/contribution.h"
#include "client/cpp/src/local_factors.h"
#include "client/cpp/src/step_ledger.h"
#include "server/core/api/contribution.h"
#include "server/core/coordinator/coordinator.h"
#include "tests/sim/checkpoints.h"
#include "tests/sim/process.h"
#include "tests/sim/sim_link.h"
#include "tests/sim/sim_method.h"

namespace precondor::sim {

class World;

// Lives in `process`, one life long. Everything that has to outlive it is in the checkpoints. What is sent, repeated
// and kept, and how far it may go, the client's own Outbox and StepLedger decide.
class SimWorker {
 public:
  SimWorker(World& world, Process& process, Checkpoints& checkpoints, uint32_t rank, uint64_t incarnation);

  void Start();
  bool done() const { return finished_; }
  // Whether the job's all-reduce of the step can have the rank's part.
  bool HasReached(uint64_t generation, uint64_t step) const {
    return step_ >= step && (generation_ == generation || step < ledger_.directive().resume_step);
  }
  uint64_t step() const { return step_; }
  uint64_t incarnation() const { return incarnation_; }
  std::string Describe() const;  // for messages

 private:
  // The job's average, which this rank preconditions.
  struct Local {
    std::vector<float> gradient;
    std::vector<float> out;
    std::shared_ptr<PreconditionFuture::State> state;
  };
  // A gradient that the step waits for.
  struct Asked {
    std::shared_ptr<Payload> memory;  // the trainer's; null until it is submitted
    std::shared_ptr<Local> local;     // the same where this rank preconditions it itself
    std::optional<uint64_t> answer;   // its digest
  };

  void Tick();
  // As it is decoded from the wire.
  WorkerDirective DirectiveOf(const Directive& directive) const;
  void SendJoin();
  void OnJoined(const JoinResult& joined);
  void EnterGeneration();
  void GoBack(const WorkerDirective& directive);
  // Goes on in epoch_ with these shards.
  void ChangeEpoch(const std::vector<ShardAssignment>& shard_map);
  std::unique_ptr<SimLink> MakeLink(SimShard& shard);
  // Begins step_ when the lease allows it.
  void BeginStep();
  // Those whose average is there.
  void SubmitGradients();
  // The trainer's memory that it is sent from.
  std::shared_ptr<Payload> Submit(v1::FrameKind kind, uint32_t layer);
  void SubmitStatistics(uint32_t layer);
  void SendRequest(v1::FrameKind kind, uint64_t step, uint32_t layer, std::shared_ptr<AnswerSink> sink);
  void OnAnswer(uint32_t layer, const GradientResult& result);
  // If workers have factors: makes the first factors of the process, and does all work on them.
  void MakeFactors();
  std::shared_ptr<Local> Precondition(uint32_t layer);
  void WorkOnFactors();
  void OnError(const absl::Status& status);
  // All that was sent is acknowledged.
  bool Flushed() const;
  void FinishStepIfComplete();
  void SendReport();
  void OnReported(uint64_t epoch, uint64_t step, const absl::StatusOr<Directive>& directive);

  World& world_;
  Process& process_;
  Checkpoints& checkpoints_;
  std::vector<uint64_t> versions_;  // of the last answers, by layer
  const uint32_t rank_;
  const uint64_t incarnation_;

  bool begun_ = false;       // step_ has begun
  bool finished_ = false;    // there is no step_
  uint64_t epoch_ = 0;       // joined; 0: not yet
  uint64_t generation_ = 0;  // the last epoch that rolled back
  uint64_t session_ = 0;
  uint64_t step_;
  Mode mode_ = Mode::kSecondOrder;
  StepLedger ledger_;
  std::map<uint32_t, Asked> asked_;                        // by layer
  std::map<std::string, std::unique_ptr<SimLink>> links_;  // by address
  std::vector<SimLink*> of_layer_;
  MethodEvents events_;
  std::unique_ptr<LocalFactors> factors_;  // null: not joined yet, or workers have none
  bool working_ = false;                   // on them
  bool work_again_ = false;
};

}  // namespace precondor::sim
