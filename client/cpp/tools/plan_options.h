// SPDX-License-Identifier: Apache-2.0
// The command line of precondorctl plan.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "client/cpp/tools/model_shapes.h"
#include "client/cpp/tools/plan.h"

namespace precondor {

// Values of flags as given, by name without dashes. The option NAME of a method is "option.NAME".
using PlanFlags = std::map<std::string, std::string>;

// Returns whether precondorctl plan has this flag.
bool IsPlanFlag(absl::string_view name);
// Adds a flag. Returns InvalidArgument for --option without a name.
absl::Status AddPlanFlag(absl::string_view name, absl::string_view value, PlanFlags& flags);

struct PlanOptions {
  std::string preset;
  std::string layers_file;  // one of preset and layers_file is given
  ExpandOptions expand;
  PlanInput input;  // without the layers
};
// Parses the flags. Returns InvalidArgument or NotFound, which name the flag and the expected and actual values.
absl::StatusOr<PlanOptions> ParsePlanOptions(const PlanFlags& flags);

// Returns the layer table that `options` name, or the errors of PresetShapes and ReadLayerTable.
absl::StatusOr<ModelShapes> PlanShapes(const PlanOptions& options);

absl::string_view PlanHelp();

}  // namespace precondor
