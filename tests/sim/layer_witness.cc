// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/layer_witness.h"

#include "tests/sim/encode.h"

namespace precondor::sim {
namespace {

bool SameAnswer(const GradientResult& x, const GradientResult& y) {
  const bool same_bytes = x.bytes == y.bytes || (x.bytes != nullptr && y.bytes != nullptr && *x.bytes == *y.bytes);
  return same_bytes && x.decision == y.decision && x.factor_version == y.factor_version && x.reason == y.reason;
}

}  // namespace

std::string LayerWitness::Text(const std::string& what, uint64_t step) const {
  return what + ": generation " + std::to_string(generation_) + " step " + std::to_string(step) + " layer " +
         std::to_string(layer_);
}

void LayerWitness::WentBack(uint64_t generation) { generation_ = generation; }

std::string LayerWitness::Made() {
  for (auto& [key, step] : steps_) step.optional = true;
  const bool allowed = applied_.empty() || released_;
  return allowed ? "" : "I5: layer " + std::to_string(layer_) + " has lost its factors";
}

std::string LayerWitness::Counted(const ContributionHeader& header, bool refused) {
  const ContributionKey& key = header.key;
  Contributors& counted = steps_[{generation_, key.step}].counted[header.kind];
  if (released_) steps_[{generation_, key.step}].optional = true;
  const bool fresh = counted.try_emplace(key.rank, key.incarnation).second;
  // Nonsense is refused as often as it comes, and stands for its rank the first time.
  if (fresh || refused) return "";
  return Text("I1: rank " + std::to_string(key.rank) + " counted twice", key.step);
}

std::optional<uint64_t> LayerWitness::NextUpdate(const Stacked& update) const {
  StepKey first{generation_, 0};
  if (last_update_.has_value() && last_update_->first == generation_) first.second = last_update_->second + 1;
  for (auto it = steps_.lower_bound(first); it != steps_.end(); ++it) {
    const auto found = it->second.counted.find(ContributionKind::kStatistics);
    if (found == it->second.counted.end()) continue;
    const bool complete = found->second.size() == static_cast<size_t>(spec_.world_size);
    const bool needed = patient_ && !it->second.optional;
    if (!complete && needed) return std::nullopt;
    const std::optional<Stacked> expected = oracle_.Update(it->first.second, layer_, found->second);
    if (expected == update) return it->first.second;
    if (expected.has_value() && needed) return std::nullopt;
  }
  return std::nullopt;
}

std::string LayerWitness::Updated(const Stacked& update, const MethodState& after) {
  const std::optional<uint64_t> step = NextUpdate(update);
  const uint64_t last = last_update_.has_value() ? last_update_->second : 0;
  if (!step.has_value()) return Text("I2: an update that is not the next step's contributors'; the last one", last);
  // What is queued for the factors that go is still applied to them.
  if (released_ && after.version == 1) {
    applied_.clear();
    released_ = false;
  }
  const MethodState before = applied_.empty() ? MethodState() : applied_.back().after;
  if (after != After(before, update)) return Text("I2: an update of another state than the last", *step);
  last_update_ = StepKey{generation_, *step};
  applied_.push_back({.step = *last_update_, .after = after});
  return "";
}

std::string LayerWitness::CheckVersion(uint64_t step, uint64_t version) const {
  if (version > applied_.size()) return Text("I2: a factor version that never was", step);
  if (version == 0 && released_) return "";
  const StepKey end{generation_, spec_.staleness_steps > 0 ? step : step + 1};
  if (version > 0 && applied_[version - 1].step >= end) return Text("I2: factors of a later step", step);
  if (version < applied_.size() && applied_[version].step < end) return Text("I2: factors of an earlier step", step);
  return "";
}

std::string LayerWitness::CheckBytes(uint64_t step, Mode mode, const GradientResult& result) const {
  const Contributors& who = steps_.at({generation_, step}).counted.at(ContributionKind::kGradient);
  const bool delegate = spec_.exchange == ExchangeMode::kDelegate;
  const size_t expected_count = delegate ? 1 : static_cast<size_t>(spec_.world_size);
  if (who.size() != expected_count) return Text("I2: answered before everybody was in", step);
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

std::string LayerWitness::Answered(const ContributionKey& key, Mode mode, const GradientResult& result) {
  Step& step = steps_[{generation_, key.step}];
  if (step.answer.has_value()) {
    return SameAnswer(*step.answer, result) ? "" : Text("I3: two answers", key.step);
  }
  if (!step.counted.contains(ContributionKind::kGradient)) return Text("I2: answered out of nothing", key.step);
  step.answer = result;
  return CheckBytes(key.step, mode, result);
}

}  // namespace precondor::sim
