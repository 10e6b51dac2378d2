// SPDX-License-Identifier: Apache-2.0
// The coordinator decides which workers take part in each session, which shard owns which layer, and which mode each
// step has. It is off the data path. Decisions are pure functions in server/policy; this class keeps the state that
// they use.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/method_set.h"
#include "server/core/api/coordinator_journal.h"
#include "server/core/api/coordinator_types.h"
#include "server/core/api/observer.h"
#include "server/core/api/session_access.h"
#include "server/core/api/shard_control.h"
#include "server/core/coordinator/ending_sessions.h"
#include "server/core/coordinator/journal_writer.h"
#include "server/core/coordinator/session_ids.h"
#include "server/core/coordinator/session_table.h"
#include "server/core/coordinator/shard_watch.h"
#include "server/core/coordinator/tenant_limits.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

class CoordinatorSession;

struct ShardEndpoint {
  // As configured; the journal names the shard so. Workers dial the address that the shard advertises, if it advertises
  // one. For the shard in this process it is a name that no address changes.
  std::string address;
  std::unique_ptr<ShardControl> control;
};

struct CoordinatorOptions {
  uint64_t lease_steps = 64;  // steps that a directive grants beyond the reported one
  bool standby = false;       // calls are UNAVAILABLE until Restore, because another coordinator may lead
  MethodFactory make_method = MakeMethod;
  absl::Duration probe_interval = absl::Seconds(1);  // time between probes of a shard
  TenantLimits tenant_limits;                        // for new sessions, not for restored ones
  int64_t table_bytes = 0;                           // most SessionTableBytes of all sessions; 0: no limit
  uint64_t snapshot_interval_steps = 0;              // between snapshots of a session; 0: only on request
  // Called once, with the reason, when a shard has reported that another coordinator has taken over. This coordinator
  // then calls no shard and answers UNAVAILABLE. Runs on any thread, without a lock. May be empty.
  std::function<void(const absl::Status&)> on_replaced;
};

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
  absl::Status CheckLeads() const;
  void RestoreEnding(uint64_t session_id, SessionRecord record);
  // `last` is the greatest token in the journal.
  absl::Status BecomeLeader(uint64_t last);
  // Stops leading, because a shard has refused a call: another coordinator leads.
  void StepDown(const absl::Status& why);
  std::vector<ShardEndpoint> Watched(std::vector<ShardEndpoint> shards);
  // Exclusive access of one operation to a session's entry. The constructor waits for it, the destructor releases it.
  class SessionLock;

  absl::StatusOr<std::shared_ptr<CoordinatorSession>> CreateSession(SessionSpec spec, SessionAccess access,
                                                                    absl::Span<const std::string> rank_devices);
  // Returns SessionBytes, or 0 if tenants have no limit of bytes.
  int64_t CountedBytes(const SessionSpec& spec) const;
  // Returns why no step of the session may be in first order, or "". An averaged gradient in the place of a whole
  // update would be plain gradient descent at that update's rate.
  std::string WhyNoFirstOrder(const SessionSpec& spec) const;
  absl::Status CheckTenants(absl::string_view name, const TenantSession& session) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns RESOURCE_EXHAUSTED (CAPACITY), with the numbers, if the session's description finds no room.
  absl::Status CheckTables(absl::string_view name, int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  struct Plan {
    std::vector<PlacedLayers> placement;  // one entry for each shard
    std::vector<uint32_t> delegates;      // SessionSpec::delegates
  };
  // Places the session's layers and, unless the spec has delegates, chooses these by `rank_devices`.
  absl::StatusOr<Plan> MakePlan(const SessionSpec& spec, absl::Span<const std::string> rank_devices);
  // Puts the shard's sessions that this coordinator does not know in quarantine: another journal may have them. Removes
  // those that this process has abandoned (SessionIds), whose Install was late. Returns whether it cleared any;
  // `description` is out of date then.
  bool ClearOrphans(const ShardEndpoint& shard, const ShardDescription& description);
  // Returns the shard's description, and records whether it answered.
  absl::StatusOr<ShardDescription> Probe(size_t shard);
  // Logs that a shard has stopped or resumed answering, and reports the number of unreachable shards.
  void ReportReachability(size_t shard, const absl::Status& probe);
  absl::Status InstallOnShards(const std::vector<SessionInstall>& installs) const;
  absl::Status RemoveFromShards(uint64_t session_id, const std::vector<PlacedLayers>& placement) const;
  // Removes an ending session from one shard, unless the shard has already confirmed that.
  absl::Status RemoveEnding(uint64_t session_id, size_t shard);
  // Removes all ending sessions from the shard.
  void RemoveEnding(size_t shard, const ShardDescription& description);
  // Writes a CloseRecord for each ending session that every shard has removed.
  void CloseRemoved();
  // Makes the shards hold the session's factors again, before a step in second order is promised. Returns an error if a
  // shard cannot.
  absl::Status HoldFactors(CoordinatorSession& session);
  // Releases factors on the shard, or holds them, where that differs from what the sessions need.
  void ReconcileFactors(size_t shard, const ShardDescription& description);
  absl::Status SendFactorHold(const CoordinatorSession& session, size_t shard, const FactorHold& hold);
  // Precondition: the caller holds the session's lock.
  absl::StatusOr<SnapshotEntry> BeginSnapshot(CoordinatorSession& session);
  // Orders the restore of a session that has just been opened. Returns the errors of RestoreSession.
  absl::StatusOr<CoordinatorSessionSummary> OrderRestore(absl::string_view name, uint64_t session_id, uint64_t step);
  // Writes the snapshot to the journal and orders its parts from the shards. Precondition: the caller holds the
  // session's lock.
  absl::Status OrderSnapshot(CoordinatorSession& session, const SnapshotEntry& planned);
  // Asks the shards for the progress of snapshots under way, and begins those that are due.
  void CompleteSnapshots();
  // Returns the snapshot with the shards' progress. `repeated`: all shards have received the order before.
  SnapshotEntry AskForParts(const CoordinatorSession& session, SnapshotEntry snapshot, bool repeated);
  // Writes and adopts the snapshot's state. Precondition: the caller holds the session's lock.
  absl::Status WriteSnapshot(CoordinatorSession& session, const SnapshotEntry& snapshot);
  // Notes that a shard has lost factors with which the session was to begin: no rank can join any more. Precondition:
  // the caller holds the session's lock.
  void FailRestore(CoordinatorSession& session, const absl::Status& reason);
  // Reports the last complete snapshot to the observer.
  void ShowLastSnapshot(absl::string_view name, const std::vector<SnapshotEntry>& snapshots);
  // Tells the session's shards the membership. Precondition: the caller holds the session's lock.
  absl::Status TellShards(CoordinatorSession& session);
  // Ends earlier epochs on the shards. If a shard no longer keeps a step that a new member needs, rolls the job back to
  // it.
  absl::Status FenceEpoch(CoordinatorSession& session);
  // Installs the session on one shard again, unless the session or its layers there no longer exist.
  void Reinstall(const std::string& name, size_t shard);
  // Plans a change, writes its record and makes the session adopt it; no other record is written in between. `plan` is
  // called under mu_, and what it reads does not change before the adoption.
  absl::Status WriteChange(CoordinatorSession& session, absl::FunctionRef<CoordinatorRecord()> plan);
  // Writes and adopts a membership. Precondition: the caller holds the session's lock.
  absl::Status WriteMembership(CoordinatorSession& session, const Membership& next);
  // Writes the lease that the session wants to grant, if it wants one.
  void WriteLease(CoordinatorSession& session);
  // Adds the records of all sessions, for a compaction.
  void AddRecords(std::vector<CoordinatorRecord>& records) const;
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  void PublishCount();

  std::atomic<bool> replaced_ = false;  // by another coordinator, as a shard has reported

  // Constant after construction.
  const CoordinatorOptions options_;
  const std::vector<ShardEndpoint> shards_;
  const Clock& clock_;
  Logger& logger_;
  Observer& observer_;

  // Thread-safe on their own. Lock order: the journal's lock, mu_, the watch's lock.
  ShardWatch watch_;
  JournalWriter journal_;

  mutable Mutex mu_;
  CondVar entry_freed_;
  SessionTable sessions_ ABSL_GUARDED_BY(mu_);
  SessionIds ids_ ABSL_GUARDED_BY(mu_);
  // Sessions that are being opened, by id. Shards may already know them; sessions_ gets them once they are durable.
  std::map<uint64_t, TenantSession> opening_ ABSL_GUARDED_BY(mu_);
  EndingSessions ending_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool leads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
