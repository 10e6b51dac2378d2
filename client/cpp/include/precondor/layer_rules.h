// SPDX-License-Identifier: Apache-2.0
// Chooses which layers of a model a session preconditions, and by which method, from their names, classes and sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"

namespace precondor {

// A parameter of the model that could be a layer.
struct ModelLayer {
  LayerSpec spec;
  std::string kind;  // name of its class in the framework, e.g. "Linear", "Conv2d", "Embedding"
};

// Decides about the layers that meet all its conditions. Sizes are those of the longer side.
struct LayerRule {
  std::string name_pattern = {};  // RE2 that matches the whole name; empty matches any
  std::string kind = {};          // empty matches any
  int64_t min_dim = 1;
  int64_t max_dim = kMaxDimension;
  bool precondition = true;                       // false: the base optimizer trains the layer
  std::optional<MethodConfig> method = {};        // nullopt: the session's method
  std::optional<StatisticsKind> statistics = {};  // nullopt: the session's statistics
};

// Result of ChooseLayers.
struct ChosenLayers {
  std::vector<LayerSpec> layers;           // for SessionSpec::layers
  std::vector<LayerMethod> layer_methods;  // for SessionSpec::layer_methods
  // For each layer of the model its index in `layers`; nullopt if the base optimizer trains it.
  std::vector<std::optional<uint32_t>> place;
};

// Chooses the layers of `model`. The first rule that matches a layer decides. If no rule matches, layers of kind
// "Embedding" and layers with a side of 1 (parameters with one dimension) are left to the base optimizer, and all
// others are preconditioned as `spec` says. Returns INVALID_ARGUMENT if RE2 rejects a pattern; the message has the
// pattern and RE2's reason. Thread-safe.
absl::StatusOr<ChosenLayers> ChooseLayers(const SessionSpec& spec, absl::Span<const ModelLayer> model,
                                          absl::Span<const LayerRule> rules);

}  // namespace precondor
