// SPDX-License-Identifier: Apache-2.0
// A method whose state is a digest of every update it was given, in their order: U = GainOf(digest) D. So a lost,
// doubled, altered or reordered update shows in every later answer. Its updates are statistics, or the gradients that
// it preconditions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/methods/method.h"

namespace precondor::sim {

// Vectors of one factor update: a [k, d_in], g [k, d_out]. Of a gradient, a is the gradient and g is empty.
struct Stacked {
  std::vector<float> a;
  std::vector<float> g;
  bool operator==(const Stacked&) const = default;
};

struct MethodState {
  uint64_t version = 0;
  uint64_t digest = 0;
  bool operator==(const MethodState&) const = default;
};
// The state after an update, and what an answer of a state is multiplied by: whole and small, so that products round
// once.
// Decodes the bytes that LayerState::Save wrote.
absl::StatusOr<MethodState> DecodeState(absl::string_view bytes);
MethodState After(const MethodState& before, const Stacked& update);
double GainOf(const MethodState& state);

// Calls by which the states of one shard process tell of themselves.
struct MethodEvents {
  std::function<void(const std::string& layer, const Stacked& update, const MethodState& after)> updated;
  std::function<void(const std::string& layer)> made;
  std::function<void(const std::string& layer, const MethodState& state)> loaded;
  bool doubles_updates = false;  // PlantedBug::kUpdate
};

class SimMethod final : public Method {
 public:
  // `events` outlives the states. `learns`: from gradients, not from statistics.
  SimMethod(const MethodEvents& events, bool learns) : events_(events), learns_(learns) {}
  const MethodTraits& traits() const override {
    static constexpr MethodTraits kTraits = {
        .name = "sim", .statistics = StatisticsForm::kVectors, .worker_factors = WorkerFactors::kReplayed};
    static constexpr MethodTraits kLearning = {
        .name = "sim", .statistics = StatisticsForm::kNone, .learns_from_gradients = true};
    return learns_ ? kLearning : kTraits;
  }
  int64_t StateBytes(const LayerSpec& layer) const override { return 4 * (layer.d_in + layer.d_out); }
  int64_t ScratchBytes(const LayerSpec&, int64_t) const override { return 128; }
  double StepFlops(const LayerSpec& layer, int64_t) const override {
    return static_cast<double>(layer.d_in) * static_cast<double>(layer.d_out);
  }
  absl::StatusOr<std::unique_ptr<LayerState>> MakeState(const LayerSpec& layer, Backend& backend) const override;

 private:
  const MethodEvents& events_;
  const bool learns_;
};

}  // namespace precondor::sim
