// SPDX-License-Identifier: Apache-2.0
// The messages between the ranks of a job beside the service, and the values that must agree between them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"
#include "tests/sim/encode.h"
#include "tests/sim/sim_random.h"

namespace precondor::sim {

inline uint64_t DigestOf(const GradientResult& result) {
  uint64_t digest = Mix(static_cast<uint64_t>(result.decision));
  if (result.bytes == nullptr) return digest;
  for (const uint8_t byte : *result.bytes) digest = Mix(digest ^ byte);
  return digest;
}

class Job {
 public:
  // The answer that a rank has for a layer; in DELEGATE the others get it from that rank. I3: all ranks get equal
  // answers in one generation of the job.
  std::string NoteAnswer(uint64_t generation, uint64_t step, uint32_t layer, uint64_t digest) {
    const auto [found, fresh] = answers_.try_emplace({generation, step, layer}, digest);
    if (fresh || found->second == digest || forgets()) return "";
    return "I3: two ranks have different answers at step " + std::to_string(step) + " layer " + std::to_string(layer);
  }
  // 0: no rank has one yet.
  uint64_t AnswerOf(uint64_t generation, uint64_t step, uint32_t layer) const {
    const auto found = answers_.find({generation, step, layer});
    return found == answers_.end() ? 0 : found->second;
  }

  // I3: the weights that a step begins with are the same everywhere.
  std::string NoteWeights(uint64_t generation, uint64_t step, uint64_t digest) {
    const auto [found, fresh] = weights_.try_emplace({generation, step}, digest);
    if (fresh || found->second == digest || forgets()) return "";
    return "I3: two ranks begin step " + std::to_string(step) + " with different weights";
  }

  // All ranks begin again with `step`: what they had heard of it and later steps is history.
  void GoBackTo(uint64_t step) {
    std::erase_if(answers_, [step](const auto& answer) { return std::get<1>(answer.first) >= step; });
    std::erase_if(weights_, [step](const auto& weights) { return weights.first.second > step; });
  }

  // A shard has lost what it had told.
  void BeInexact() { inexact_ = true; }
  bool inexact() const { return inexact_; }
  // Ranks are lost as well: perhaps no process is left that knows what a shard had told.
  void MayForget() { may_forget_ = true; }

  // I4: a step has one mode, on every worker and shard, whatever happens to the coordinator.
  std::string NoteMode(uint64_t step, Mode mode) {
    const auto [found, fresh] = modes_.try_emplace(step, mode);
    if (fresh || found->second == mode) return "";
    return "I4: step " + std::to_string(step) + " has two modes";
  }

 private:
  std::map<std::tuple<uint64_t, uint64_t, uint32_t>, uint64_t> answers_;  // generation, step, layer
  std::map<std::pair<uint64_t, uint64_t>, uint64_t> weights_;             // generation, step
  std::map<uint64_t, Mode> modes_;
  bool forgets() const { return inexact_ && may_forget_; }

  bool inexact_ = false;
  bool may_forget_ = false;
};

}  // namespace precondor::sim
