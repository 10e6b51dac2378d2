// SPDX-License-Identifier: Apache-2.0
// The input of placement: costs and sizes of a session's layers.
#pragma once

#include <vector>

#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"
#include "server/policy/placement.h"

namespace precondor {

// Returns cost and memory of every layer. The cost is the FLOPs of one step: update and preconditioning.
std::vector<PlacementLayer> EstimateLayers(const SessionSpec& spec, const MethodSet& methods);

}  // namespace precondor
