// SPDX-License-Identifier: Apache-2.0
// What shards, workers and operators are told of a session. Pure functions of its state.
#pragma once

#include <vector>

#include "kernels/base/session_spec.h"
#include "server/core/coordinator/coordinator_types.h"
#include "server/core/shard/shard_control.h"

namespace precondor {

class CoordinatorSession;

// How the session's epoch begins, for each shard with layers.
EpochFence MakeFence(const CoordinatorSession& session);
// One entry for each shard, in the coordinator's order; a shard without layers is not to be told.
std::vector<SessionInstall> MakeInstalls(const CoordinatorSession& session);
Directive MakeDirective(const CoordinatorSession& session);
CoordinatorSessionSummary MakeSummary(const CoordinatorSession& session);
// Mode of the last step that all ranks have reported.
Mode LastMode(const CoordinatorSession& session);

}  // namespace precondor
