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

// Flags as they came, by name without dashes; those of methods' options by "option.<name>".
using PlanFlags = std::map<std::string, std::string>;

bool IsPlanFlag(absl::string_view name);
// InvalidArgument: --option without a name.
absl::Status AddPlanFlag(absl::string_view name, absl::string_view value, PlanFlags& flags);

struct PlanOptions {
  std::string preset;
  std::string layers_file;  // one of the two
  ExpandOptions expand;
  PlanInput input;  // all but the layers
};
// InvalidArgument or NotFound name the flag, what was expected and what came.
absl::StatusOr<PlanOptions> ParsePlanOptions(const PlanFlags& flags);

// The layer table that `options` name. Errors are those of the table's reader.
absl::StatusOr<ModelShapes> PlanShapes(const PlanOptions& options);

absl::string_view PlanHelp();

}  // namespace precondor
