// SPDX-License-Identifier: Apache-2.0
// Renders a plan as a table for people and as JSON for programs. Pure functions.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "client/cpp/tools/model_shapes.h"
#include "client/cpp/tools/plan.h"

namespace precondor {

// Precondition: `plan` was made from `input`, whose layers are those of `model`.
std::string PlanTable(const ModelShapes& model, const PlanInput& input, const Plan& plan);
nlohmann::json PlanJson(const ModelShapes& model, const PlanInput& input, const Plan& plan);

}  // namespace precondor
