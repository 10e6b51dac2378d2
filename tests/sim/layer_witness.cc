// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/layer_witness.h"

#include <algorithm>
#include <utility>

#include "tests/sim/encode.h"

namespace precondor::sim {
namespace {

bool SameAnswer(const GradientResult& x, const GradientResult& y) {
  // A pull is answered with vectors, or with the factors that come of them.
  const bool same_form = x.tensors.empty() == y.tensors.empty();
  const bool same_bytes =
      !same_form || x.bytes == y.bytes || (x.bytes != nullptr && y.bytes != nullptr && *x.bytes == *y.bytes);
  // The version is for information only if no factors are in the answer.
  const bool same_version = x.decision != Decision::kPreconditioned || x.factor_version == y.factor_version;
  // A refused gradient comes back, where it is needed again, as its rank's abstention.
  const bool same_reason = x.decision == Decision::kSkip || x.reason == y.reason;
  return same_bytes && x.decision == y.decision && same_version && same_reason;
}

}  // namespace

std::string LayerWitness::Text(const std::string& what, uint64_t step) const {
  return what + ": generation " + std::to_string(generation_) + " step " + std::to_string(step) + " layer " +
         std::to_string(layer_);
}

void LayerWitness::RolledBack(uint64_t generation) {
  generation_ = generation;
  for (auto& [rank, next_step] : resumed_) next_step = 0;
}

std::string LayerWitness::Made() {
  if (replaying_ || inexact_) {
    replaced_ = std::exchange(state_, {});
    return "";
  }
  replaying_ = false;
  for (auto& [key, step] : steps_) step.optional = true;
  return Last().version == 0 || restoring_ ? "" : "I5: layer " + std::to_string(layer_) + " has lost its factors";
}

std::string LayerWitness::Restored() {
  restoring_ = false;
  if (!learns_ || inexact_ || !replaying_) return "";
  return "I5: layer " + std::to_string(layer_) + " comes back without gradients that it had taken in";
}

void LayerWitness::Lost(bool machine) {
  // Contributions that workers sent again after a first loss may have been applied out of order.
  unchecked_ = inexact_ && !learns_;
  inexact_ = inexact_ || machine;
  restoring_ = true;
  replaying_ = Last().version > 0 || inexact_;
  state_ = replaced_ = {};
  resumed_.clear();
  for (auto& [key, step] : steps_) {
    // Gradients are gathered anew, for the same answer; so are statistics that are not in the factors.
    step.gathered = MadeOf(step).value_or(step.gathered);
    step.counted.erase(AnsweredKind());
    if (inexact_ || !last_update_.has_value() || key > *last_update_) {
      // A step that was skipped, because no rank had statistics, stays skipped; how many ranks repeat it does not
      // matter.
      const Contributors& counted = step.counted[ContributionKind::kStatistics];
      const bool complete = counted.size() == static_cast<size_t>(spec_.world_size);
      step.optional = step.optional || (complete && !oracle_.Update(key.second, layer_, counted).has_value());
      step.counted.erase(ContributionKind::kStatistics);
    }
  }
}

std::string LayerWitness::Loaded(const MethodState& state) {
  state_ = state;
  if (state.version == 0 || unchecked_) return "";
  if (!inexact_ && state == Last()) replaying_ = false;
  const auto found = states_.find(state.digest);
  if (found != states_.end() && found->second == state) return "";
  return "I5: layer " + std::to_string(layer_) + " comes back with a state that never was";
}

Contributors LayerWitness::AllRanks() const {
  Contributors all;
  for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec_.world_size); ++rank) all[rank] = 0;
  if (learns_ && spec_.exchange == ExchangeMode::kDelegate) {
    all = {{static_cast<uint32_t>(DelegateRank(spec_, layer_)), 0}};
  }
  return all;
}

std::optional<Contributors> LayerWitness::MadeOf(const Step& step) const {
  const auto found = step.counted.find(learns_ ? ContributionKind::kGradient : ContributionKind::kStatistics);
  if (found != step.counted.end() && found->second.size() == AllRanks().size()) return found->second;
  // Statistics that come again may be sealed without some rank.
  if (step.gathered.empty() || (!learns_ && found != step.counted.end())) return std::nullopt;
  return step.gathered;
}

std::optional<Stacked> LayerWitness::UpdateOf(uint64_t step, const Contributors& who) const {
  if (!learns_) return oracle_.Update(step, layer_, who);
  std::optional<std::vector<float>> average = oracle_.Average(step, layer_, who);
  if (!average.has_value()) return std::nullopt;
  return Stacked{.a = *std::move(average), .g = {}};
}

bool LayerWitness::MadeOfSomeStep(const Stacked& update) const {
  const Contributors all = AllRanks();
  for (const auto& [key, step] : steps_) {
    if (UpdateOf(key.second, all) == update) return true;
  }
  return !patient_;
}

std::string LayerWitness::Replayed(const Stacked& update, const MethodState& after) {
  if (unchecked_) return "";
  // Fresh factors are made while what was restored for those that go waits for its turn.
  const bool in_line =
      after == After(state_, update) || after == After({}, update) || after == After(replaced_, update);
  const auto found = states_.find(after.digest);
  const bool known = found != states_.end() && found->second == after;
  if (!in_line || (!known && (restoring_ || !inexact_ || !MadeOfSomeStep(update)))) {
    return "I5: layer " + std::to_string(layer_) + " comes back to a state that never was";
  }
  state_ = after;
  states_.emplace(after.digest, after);
  if (!inexact_ && after == Last()) replaying_ = false;
  return "";
}

std::string LayerWitness::Counted(const ContributionHeader& header, bool refused) {
  const ContributionKey& key = header.key;
  Contributors& counted = steps_[{generation_, key.step}].counted[header.kind];
  const bool fresh = counted.try_emplace(key.rank, key.incarnation).second;
  // Nonsense is refused each time, and stands for its rank the first time.
  if (fresh || refused || inexact_) return "";
  return Text("I1: rank " + std::to_string(key.rank) + " counted twice", key.step);
}

std::optional<uint64_t> LayerWitness::NextUpdate(const Stacked& update) const {
  StepKey first{generation_, 0};
  if (last_update_.has_value() && last_update_->first == generation_) first.second = last_update_->second + 1;
  for (auto it = steps_.lower_bound(first); it != steps_.end(); ++it) {
    const auto found = it->second.counted.find(learns_ ? ContributionKind::kGradient : ContributionKind::kStatistics);
    const std::optional<Contributors> who = MadeOf(it->second);
    if (!who.has_value() && found == it->second.counted.end()) continue;
    const bool complete = who.has_value();
    const bool needed = patient_ && !it->second.optional && !(late_ && applied_.empty());
    if (!complete && needed) return std::nullopt;
    const std::optional<Stacked> expected = UpdateOf(it->first.second, complete ? *who : found->second);
    if (expected == update) return it->first.second;
    if (expected.has_value() && needed && found != it->second.counted.end()) return std::nullopt;
  }
  return std::nullopt;
}

std::string LayerWitness::Updated(const Stacked& update, const MethodState& after) {
  if (inexact_ || replaying_) return Replayed(update, after);
  const std::optional<uint64_t> step = NextUpdate(update);
  const uint64_t last = last_update_.has_value() ? last_update_->second : 0;
  if (!step.has_value() && after == After(Last(), update) && Had(after)) {
    // It had written the update when it died, and comes back with it; the contributors are counted no more.
    for (auto it = last_update_.has_value() ? steps_.upper_bound(*last_update_) : steps_.begin(); it != steps_.end();
         ++it) {
      const auto counted =
          it->second.counted.find(learns_ ? ContributionKind::kGradient : ContributionKind::kStatistics);
      if (counted == it->second.counted.end() && it->second.gathered.empty()) continue;
      it->second.optional = true;
      break;
    }
    state_ = after;
    applied_.push_back({.step = last_update_.value_or(StepKey{}), .after = after});
    return "";
  }
  if (!step.has_value()) return Text("I2: an update that is not the next step's contributors'; the last one", last);
  if (after != After(Last(), update)) return Text("I2: an update of another state than the last", *step);
  state_ = after;
  states_.emplace(after.digest, after);
  last_update_ = StepKey{generation_, *step};
  applied_.push_back({.step = *last_update_, .after = after});
  return "";
}

std::string LayerWitness::CheckVersion(uint64_t step, uint64_t version) const {
  if (version > applied_.size()) return Text("I2: a factor version that never was", step);
  if (learns_) {
    const bool own = version > 0 && applied_[version - 1].step == StepKey{generation_, step};
    return own ? "" : Text("I2: factors of another step", step);
  }
  const StepKey end{generation_, step + 1};
  if (version > 0 && applied_[version - 1].step >= end) return Text("I2: factors of a later step", step);
  if (version < applied_.size() && applied_[version].step < end) return Text("I2: factors of an earlier step", step);
  return "";
}

std::string LayerWitness::CheckBytes(uint64_t step, Mode mode, const GradientResult& result) const {
  const Step& of = steps_.at({generation_, step});
  const auto counted = of.counted.find(ContributionKind::kGradient);
  const bool delegate = spec_.exchange == ExchangeMode::kDelegate;
  const size_t expected_count = delegate ? 1 : static_cast<size_t>(spec_.world_size);
  const bool now = counted != of.counted.end() && counted->second.size() == expected_count;
  const Contributors who = now ? counted->second : learns_ ? of.gathered : Contributors();
  if (who.size() != expected_count) return Text("I2: answered before all ranks were in", step);
  const std::optional<std::vector<float>> average = oracle_.Average(step, layer_, who);
  if (average.has_value() == (result.decision == Decision::kSkip)) return Text("I2: wrong decision", step);
  if (!average.has_value()) return "";
  double gain = 1;
  if (mode == Mode::kSecondOrder) {
    if (std::string wrong = CheckVersion(step, result.factor_version); !wrong.empty()) return wrong;
    if (result.factor_version > 0) gain = GainOf(applied_[result.factor_version - 1].after);
  }
  const bool conditioned = mode == Mode::kSecondOrder && result.factor_version > 0;
  if ((result.decision == Decision::kPreconditioned) != conditioned) return Text("I2: wrong decision", step);
  std::vector<float> expected;
  for (float value : *average) expected.push_back(static_cast<float>(gain * static_cast<double>(value)));
  if (result.bytes == nullptr || *result.bytes != Encode(expected)) return Text("I2: wrong bytes", step);
  return "";
}

std::string LayerWitness::CheckLearned(uint64_t step, const GradientResult& result) const {
  // No rank takes an answer that all have had: the factors may be past it.
  const bool had =
      std::all_of(resumed_.begin(), resumed_.end(), [step](const auto& rank) { return rank.second > step; });
  if (had && resumed_.size() == AllRanks().size()) return "";
  const std::optional<Stacked> update = UpdateOf(step, AllRanks());
  if (update.has_value() == (result.decision == Decision::kSkip)) return Text("I2: wrong decision", step);
  if (!update.has_value()) return "";
  if (result.decision != Decision::kPreconditioned) return Text("I2: wrong decision", step);
  for (const auto& [digest, before] : states_) {
    if (before.version + 1 != result.factor_version) continue;
    const MethodState after = After(before, *update);
    std::vector<float> expected;
    for (const float value : update->a) expected.push_back(static_cast<float>(GainOf(after) * double{value}));
    if (states_.contains(after.digest) && result.bytes != nullptr && *result.bytes == Encode(expected)) return "";
  }
  return Text("I2: wrong bytes after a loss", step);
}

std::string LayerWitness::Resumed(const RankResume& resume, uint64_t lost) {
  if (!learns_ || resume.begins || !resumed_.try_emplace(resume.key.rank, resume.next_step).second) return "";
  const uint64_t lacks = resume.factor_version > state_.version ? resume.factor_version - state_.version : 0;
  return lost == lacks
             ? ""
             : Text("I3: a rank is told that it lost " + std::to_string(lost) + " updates, of " + std::to_string(lacks),
                    resume.key.step);
}

std::string LayerWitness::CheckHanded(uint64_t step, const GradientResult& result) const {
  if (std::string wrong = CheckVersion(step, result.factor_version); !wrong.empty()) return wrong;
  const uint64_t version = result.factor_version;
  const bool made = version > 0 && applied_[version - 1].step == StepKey{generation_, step};
  if (made != (result.decision == Decision::kPreconditioned)) return Text("I2: wrong decision", step);
  if (!made) return result.bytes == nullptr ? "" : Text("I2: wrong bytes", step);
  if (result.tensors.empty()) return Fetched(result);
  const Step& of = steps_.at({generation_, step});
  const auto counted = of.counted.find(ContributionKind::kStatistics);
  // Statistics that are refused are counted again each time, also after the update that the shard came back with.
  for (const Contributors* who : {counted == of.counted.end() ? nullptr : &counted->second, &of.gathered}) {
    std::optional<Stacked> expected = who == nullptr ? std::nullopt : oracle_.Update(step, layer_, *who);
    if (!expected.has_value()) continue;
    expected->a.insert(expected->a.end(), expected->g.begin(), expected->g.end());
    if (*result.bytes == Encode(expected->a)) return "";
  }
  return Text("I2: wrong bytes", step);
}

std::string LayerWitness::Fetched(const GradientResult& result) const {
  if (inexact_ || result.decision != Decision::kPreconditioned) return "";
  const absl::StatusOr<MethodState> state =
      DecodeState(absl::string_view(reinterpret_cast<const char*>(result.bytes->data()), result.bytes->size()));
  if (!state.ok()) return "I2: layer " + std::to_string(layer_) + ": " + state.status().ToString();
  return (state->version == 0 || Had(*state)) && state->version == result.factor_version
             ? ""
             : "I2: layer " + std::to_string(layer_) + " is handed out as it never was";
}

std::string LayerWitness::Answered(const ContributionKey& key, Mode mode, const GradientResult& result) {
  if (inexact_) return learns_ ? CheckLearned(key.step, result) : "";
  Step& step = steps_[{generation_, key.step}];
  if (step.answer.has_value()) {
    if (SameAnswer(*step.answer, result)) return "";
    return Text("I3: two answers, of version " + std::to_string(step.answer->factor_version) + " " +
                    step.answer->reason + " and " + std::to_string(result.factor_version) + " " + result.reason,
                key.step);
  }
  if (!step.counted.contains(AnsweredKind()) && !(learns_ && !step.gathered.empty())) {
    return Text("I2: answered out of nothing", key.step);
  }
  step.answer = result;
  return WorkersPrecondition(spec_) ? CheckHanded(key.step, result) : CheckBytes(key.step, mode, result);
}

}  // namespace precondor::sim
