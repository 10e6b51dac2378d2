// SPDX-License-Identifier: Apache-2.0
// precondorctl plan: its command line, and a plan as a table for people and as JSON for programs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include <nlohmann/json_fwd.hpp>

#include "client/cpp/tools/flags.h"
#include "client/cpp/tools/model_shapes.h"
#include "client/cpp/tools/plan.h"

namespace precondor {

struct PlanOptions {
  PlanOptions();

  std::string preset;
  std::string layers_file;  // one of preset and layers_file is given
  ExpandOptions expand;
  double shard_memory_gib = 8;
  std::map<std::string, std::string> method_options;  // by name, as given
  PlanInput input;                                    // without the layers
};
// The flags that set `options`, which outlives them.
std::vector<Flag> PlanFlags(PlanOptions& options);
// Completes options.input once all flags are set. Returns InvalidArgument or NotFound, which name the flag and the
// expected and actual values.
absl::Status CheckPlan(PlanOptions& options);

// Returns the layer table that `options` name, or the errors of PresetShapes and ReadLayerTable.
absl::StatusOr<ModelShapes> PlanShapes(const PlanOptions& options);

absl::string_view PlanHelp();

// Precondition: `plan` was made from `input`, whose layers are those of `model`.
std::string PlanTable(const ModelShapes& model, const PlanInput& input, const Plan& plan);
nlohmann::json PlanJson(const ModelShapes& model, const PlanInput& input, const Plan& plan);

}  // namespace precondor
