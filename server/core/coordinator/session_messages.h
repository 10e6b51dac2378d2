// SPDX-License-Identifier: Apache-2.0
// Makes the messages about a session to the journal, shards, workers and operators. Pure functions of its state.
#pragma once

#include <vector>

#include "kernels/base/session_spec.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/coordinator_types.h"
#include "server/core/api/shard_control.h"

namespace precondor {

class CoordinatorSession;

// Returns the session's state except its snapshots.
SessionRecord MakeRecord(const CoordinatorSession& session);
// Announces the session's epoch, for each shard with layers.
EpochFence MakeFence(const CoordinatorSession& session);
// Returns one entry for each shard, in the coordinator's order. Entries without layers must not be sent.
std::vector<SessionInstall> MakeInstalls(const CoordinatorSession& session);
Directive MakeDirective(const CoordinatorSession& session);
CoordinatorSessionSummary MakeSummary(const CoordinatorSession& session);
// Returns the mode of the last step that all ranks have reported.
Mode LastMode(const CoordinatorSession& session);

}  // namespace precondor
