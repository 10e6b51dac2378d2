// SPDX-License-Identifier: Apache-2.0
// Watches one layer at its shard: what was counted, what the factors became, what was answered, and whether each of
// these was allowed. Every method returns what went against an invariant, or "".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/core/api/contribution.h"
#include "tests/sim/oracle.h"
#include "tests/sim/sim_method.h"

namespace precondor::sim {

// A generation is the run of epochs from one in which the job rolled back up to the next such epoch. A decision in one
// of these epochs holds in all of them. Each shard has generations of its own, as it was told of them.
class LayerWitness {
 public:
  // `patient`: steps are sealed with all ranks, whatever it takes. `late`: the layer comes from another shard, in the
  // middle of the job; of the steps before the first that all ranks send it again, or for the first time, it may not
  // hear enough.
  // `learns`: the method's updates are the gradients that it preconditions.
  LayerWitness(const Oracle& oracle, const SessionSpec& spec, uint32_t layer, bool learns, bool patient, bool late,
               uint64_t generation)
      : oracle_(oracle),
        spec_(spec),
        layer_(layer),
        learns_(learns),
        patient_(patient),
        late_(late),
        generation_(generation) {}

  // The shard dropped its open steps: the job begins again with `step`.
  void RolledBack(uint64_t generation);
  uint64_t generation() const { return generation_; }

  // The shard made factors, to load a state into or not (I5: it had none).
  std::string Made();
  // The shard's process died. `machine`: with what its disk had not taken yet, so that what comes after may differ from
  // what was; that it comes back with a state that once was is still checked.
  void Lost(bool machine);
  // The state that it loads, and those that updates make until it is where it was, have been there before (I5).
  std::string Loaded(const MethodState& state);
  // The layer has read its whole log. A method that learns from gradients then has its state again (I5).
  std::string Restored();

  // The shard took a contribution in (I1: each rank of a step once).
  std::string Counted(const ContributionHeader& header, bool refused);
  // The factors took an update in (I2: made of a step's contributors, each step once, in order, none left out).
  std::string Updated(const Stacked& update, const MethodState& after);
  // The shard answered (I2 for the bytes, I3: equal answers to all ranks that ask in this generation).
  std::string Answered(const ContributionKey& key, Mode mode, const GradientResult& result);
  // A rank that goes on with other factors than it had its last answer with is told how many updates it has lost.
  // `lost`: what the shard says to the first RESUME of the rank.
  std::string Resumed(const RankResume& resume, uint64_t lost);
  // The factors took something in while the process died: it may come back with it or not.
  void Unseen(const MethodState& after) { states_.emplace(after.digest, after); }
  // The factors were ever in that state.
  bool Had(const MethodState& state) const {
    const auto found = states_.find(state.digest);
    return found != states_.end() && found->second == state;
  }
  // It gave a worker its factors (I2: some that have been).
  std::string Fetched(const GradientResult& result) const;

 private:
  using StepKey = std::pair<uint64_t, uint64_t>;  // generation, step
  struct Step {
    std::map<ContributionKind, Contributors> counted;
    Contributors gathered;  // what an update may be made of since the shard died with it
    std::optional<GradientResult> answer;
    bool optional = false;  // its update may be left out
  };
  struct Applied {
    StepKey step;
    MethodState after;
  };

  std::string Text(const std::string& what, uint64_t step) const;
  std::string Replayed(const Stacked& update, const MethodState& after);
  // The contributors of a step's update, once they are known.
  std::optional<Contributors> MadeOf(const Step& step) const;
  std::optional<Stacked> UpdateOf(uint64_t step, const Contributors& who) const;
  Contributors AllRanks() const;
  bool MadeOfSomeStep(const Stacked& update) const;
  std::optional<uint64_t> NextUpdate(const Stacked& update) const;
  // The factors after all updates.
  MethodState Last() const { return applied_.empty() ? MethodState() : applied_.back().after; }
  std::string CheckVersion(uint64_t step, uint64_t version) const;
  std::string CheckBytes(uint64_t step, Mode mode, const GradientResult& result) const;
  // After a loss: the answer is that of the step's gradients, as a state that has taken them in gives it.
  std::string CheckLearned(uint64_t step, const GradientResult& result) const;
  // The same of what is handed out to workers that have the factors themselves.
  std::string CheckHanded(uint64_t step, const GradientResult& result) const;
  ContributionKind AnsweredKind() const {
    return WorkersPrecondition(spec_) ? ContributionKind::kPull : ContributionKind::kGradient;
  }

  const Oracle& oracle_;
  const SessionSpec& spec_;
  const uint32_t layer_;
  const bool learns_;
  const bool patient_;
  const bool late_;
  uint64_t generation_;
  std::map<StepKey, Step> steps_;
  std::vector<Applied> applied_;  // by version - 1
  std::optional<StepKey> last_update_;
  std::map<uint64_t, MethodState> states_ = {{0, {}}};  // that have ever been, by digest
  MethodState state_;                                   // of the factors at present
  MethodState replaced_;                                // of those that the present ones are to replace
  bool replaying_ = false;                              // not yet what it was when it died
  bool restoring_ = false;                              // reading
  bool inexact_ = false;
  bool unchecked_ = false;
  // The first step whose answer it lacks, of each rank that has said so since the shard came back.
  std::map<uint32_t, uint64_t> resumed_;
};

}  // namespace precondor::sim
