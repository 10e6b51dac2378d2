// SPDX-License-Identifier: Apache-2.0
// The coordinator decides which workers take part in each session, which shard owns which layer, and which mode each
// step has. It is off the data path. It is a controller: CoordinatorState is a value, Reconcile (reconcile.h) and the
// decisions in server/policy are pure functions, and the rest calls shards and writes the journal.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/coordinator_types.h"
#include "server/core/api/observer.h"
#include "server/core/api/session_access.h"
#include "server/core/coordinator/coordinator_options.h"

namespace precondor {

struct CoordinatorContext;

// Thread-safe. Calls block while shards are called or the journal is written, so servers run them off their RPC
// threads. Errors are those of session.proto with an ErrorReason, and UNAVAILABLE if the journal cannot be written; no
// change has taken effect then.
class Coordinator {
 public:
  // All references must outlive the coordinator.
  Coordinator(CoordinatorOptions options, std::vector<ShardEndpoint> shards, CoordinatorJournal& journal,
              const Clock& clock, Logger& logger, Observer& observer);
  ~Coordinator();

  // Restores the sessions from the journal's records, in their order, and begins to lead with a fencing token that is
  // greater than all earlier ones (ShardControl::BecomeLeader). Precondition: no other call has been made. Returns
  // FAILED_PRECONDITION if a session has layers on a shard that is not among this coordinator's, UNAVAILABLE if the
  // token cannot be written.
  absl::Status Restore(absl::Span<const CoordinatorRecord> records);
  // Compares what every shard holds with what the coordinator knows. Installs missing sessions, puts unknown sessions
  // in quarantine, removes ended ones, and advances snapshots. A server calls it right after Restore and then
  // periodically. One caller at a time.
  void Reconcile();
  // Checks whether a shard is alive. A server does this for each shard on a thread of its own, as often as Reconcile,
  // so that a shard that hangs does not delay the probes of the others.
  void ProbeShard(size_t shard);

  // The next five calls return PERMISSION_DENIED if the session's access does not admit the caller; the calls that take
  // a session_id also require the session's secret.
  // `rank_devices`: the device of each rank (DelegateByDevice), or none. Only the call that creates a session uses it.
  absl::StatusOr<OpenResult> OpenSession(const SessionSpec& spec, const SessionCaller& caller = {},
                                         absl::Span<const std::string> rank_devices = {});
  // `first_step` is the step at which the worker begins or continues.
  absl::StatusOr<JoinResult> JoinSession(absl::string_view name, uint32_t rank, uint64_t incarnation,
                                         uint64_t first_step, const SessionCaller& caller = {});
  absl::StatusOr<Directive> ReportStep(const StepReport& report, const SessionCaller& caller = {});
  absl::Status LeaveSession(uint64_t session_id, uint32_t rank, uint64_t incarnation, const SessionCaller& caller = {});
  absl::StatusOr<bool> CloseSession(absl::string_view name, const SessionCaller& caller = {});

  // Sets the session's mode for an operator; nullopt returns the choice to the policy. It takes effect at the first
  // step that has not been granted to any rank.
  absl::StatusOr<CoordinatorSessionSummary> SetMode(absl::string_view name, std::optional<Mode> mode);

  // Begins a snapshot of the whole session as of a step that has not been granted to any rank. It completes or fails
  // later; see CoordinatorSessionSummary. Returns FAILED_PRECONDITION if a snapshot is under way or a shard cannot take
  // its part.
  absl::StatusOr<SnapshotEntry> CreateSnapshot(absl::string_view name);
  // Opens a session that begins with factors from outside, as of `step`. No worker can join before all shards have
  // received them (SnapshotRequests::RestoreLayer). Returns FAILED_PRECONDITION if a session of that name exists or a
  // shard cannot take part, ABORTED if the session is closed meanwhile.
  absl::StatusOr<RestoreResult> RestoreSession(const SessionSpec& spec, uint64_t step, const SessionCaller& caller = {},
                                               absl::Span<const std::string> rank_devices = {});

  std::vector<CoordinatorSessionSummary> ListSessions() const;
  absl::StatusOr<CoordinatorSessionSummary> GetSession(absl::string_view name) const;
  std::vector<std::string> ShardAddresses() const;
  // Makes OpenSession return UNAVAILABLE (DRAINING) from now on.
  void BeginDrain();
  // Ends the calls to shards that are in progress, and all later ones, with CANCELLED.
  void CancelShardCalls();

 private:
  const std::unique_ptr<CoordinatorContext> context_;
};

}  // namespace precondor
