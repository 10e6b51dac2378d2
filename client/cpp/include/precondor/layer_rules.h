// SPDX-License-Identifier: Apache-2.0
// Which layers of a model a session preconditions, and by which method: by name, class and size.
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
  std::string kind;  // as the framework calls its class, e.g. "Linear", "Conv2d", "Embedding"
};

// Matches a layer that fits all that is given. Sizes are those of the longer side.
struct LayerRule {
  std::string name_pattern = {};  // RE2, of the whole name; empty: any
  std::string kind = {};          // empty: any
  int64_t min_dim = 1;
  int64_t max_dim = kMaxDimension;
  bool precondition = true;                       // false: left to the base optimizer
  std::optional<MethodConfig> method = {};        // absent: the session's
  std::optional<StatisticsKind> statistics = {};  // absent: the session's
};

struct ChosenLayers {
  std::vector<LayerSpec> layers;           // for SessionSpec::layers
  std::vector<LayerMethod> layer_methods;  // for SessionSpec::layer_methods
  // Of each of the model's layers its place in `layers`; absent: it is the base optimizer's.
  std::vector<std::optional<uint32_t>> place;
};

// The first rule that matches decides. Where none does, kind "Embedding" and whatever has a side of 1 (a parameter with
// one dimension) is left to the base optimizer, and the rest is preconditioned as `spec` says. InvalidArgument: a
// pattern that RE2 does not take, named with its reason. Thread-safe.
absl::StatusOr<ChosenLayers> ChooseLayers(const SessionSpec& spec, absl::Span<const ModelLayer> model,
                                          absl::Span<const LayerRule> rules);

}  // namespace precondor
