// SPDX-License-Identifier: Apache-2.0
// Restores a coordinator from its journal when it begins to lead.
#include <algorithm>
#include <utility>
#include <variant>

#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_context.h"
#include "server/core/coordinator/session_messages.h"
#include "server/core/coordinator/session_operations.h"

namespace precondor {
namespace {

// Shows logger and observer a session from the journal.
void ShowRestored(CoordinatorContext& c, const CoordinatorSession& session) {
  const std::string& name = session.spec.name;
  const SessionMembers& members = session.members();
  c.observer.OnSessionOpened(name);
  ShowLastSnapshot(c, name, session.snapshots().list());
  c.observer.OnEpoch(name, members.epoch(), members.joined(), session.spec.world_size);
  c.logger.Log(Severity::kInfo, "session restored",
               {{"session", name},
                {"session_id", session.id},
                {"epoch", members.epoch()},
                {"joined", members.joined()},
                {"granted_through", MakeDirective(session).lease_through_step}});
}

// Makes the shards refuse earlier coordinators. `last` is the greatest token in the journal.
absl::Status BecomeLeader(CoordinatorContext& c, uint64_t last) {
  PRECONDOR_ASSIGN_OR_RETURN(const uint64_t token, c.journal.BeginToLead(last, c.clock.Wall()));
  for (const ShardEndpoint& shard : c.shards) shard.control->BecomeLeader(token);
  c.logger.Log(Severity::kInfo, "coordinator leads", {{"fencing_token", token}});
  return absl::OkStatus();
}

}  // namespace

absl::Status Coordinator::Restore(absl::Span<const CoordinatorRecord> records) {
  CoordinatorContext& c = *context_;
  std::vector<PlacedLayers> shards;
  for (const ShardEndpoint& shard : c.shards) {
    shards.push_back({.shard = shard.address, .address = shard.control->own_address(), .layers = {}});
  }
  PRECONDOR_ASSIGN_OR_RETURN(CoordinatorState restored, RestoreState(records, shards, c.options.lease_steps));
  for (const auto& [id, session] : restored.open) {
    ShowRestored(c, *session);
    if (c.options.tenant_limits.bytes == 0) continue;
    const absl::StatusOr<MethodSet> methods = MethodSet::Make(session->spec, c.options.make_method);
    if (methods.ok()) restored.counted[id].bytes = SessionBytes(session->spec, *methods);
  }
  uint64_t last_token = 0;
  for (const CoordinatorRecord& record : records) {
    if (const auto* led = std::get_if<LeaderRecord>(&record)) last_token = std::max(last_token, led->token);
  }
  PRECONDOR_RETURN_IF_ERROR(BecomeLeader(c, last_token));
  {
    MutexLock lock(c.mu);
    restored.leads = true;
    restored.draining = c.state.draining;
    c.state = std::move(restored);
    c.watch.Restart(c.clock.Now());
  }
  c.PublishCount();
  return absl::OkStatus();
}

}  // namespace precondor
