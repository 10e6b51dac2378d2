// SPDX-License-Identifier: Apache-2.0
// What a set of layers takes on a shard.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/methods/method.h"
#include "server/core/session_context.h"
#include "server/core/session_factors.h"
#include "server/core/shard_control.h"

namespace precondor {

// Bytes to be reserved.
SessionFactors::Sizes FactorSizes(const ShardContext& shard, const SessionInstall& install, const MethodSet& methods);

// Whether layers that are new here, in this install, go on from what another shard has written down of them.
bool TakesOver(const ShardContext& shard, const SessionInstall& install);

// Floats of the largest statistics and gradient scratch that one operation needs.
std::pair<int64_t, int64_t> ScratchElements(const SessionInstall& install);

}  // namespace precondor
