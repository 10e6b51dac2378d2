// SPDX-License-Identifier: Apache-2.0
// The coordinator: who takes part in each session, which shard owns which layer, which mode each step has.
// Off the data path. Decisions are pure functions in server/policy; this class keeps the state they act on.
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
#include "server/core/coordinator/coordinator_journal.h"
#include "server/core/coordinator/coordinator_types.h"
#include "server/core/coordinator/ending_sessions.h"
#include "server/core/coordinator/journal_writer.h"
#include "server/core/coordinator/session_ids.h"
#include "server/core/coordinator/session_table.h"
#include "server/core/coordinator/shard_watch.h"
#include "server/core/coordinator/tenant_limits.h"
#include "server/core/observer.h"
#include "server/core/session_access.h"
#include "server/core/shard/shard_control.h"
#include "server/policy/fallback.h"
#include "server/policy/lease.h"

namespace precondor {

class CoordinatorSession;

struct ShardEndpoint {
  std::string address;  // as configured; workers dial the shard's advertised address when it has one
  std::unique_ptr<ShardControl> control;
};

struct CoordinatorOptions {
  uint64_t lease_steps = 64;  // steps that a directive grants beyond the one reported
  bool standby = false;       // another one may lead: every call is Unavailable until Restore
  MethodFactory make_method = MakeMethod;
  // A shard that has not answered for so long is lost to sessions that degrade: their layers there begin anew on
  // others. Half of it is for how long a shard may go on with such a session unheard.
  // Silence counts in probes that were sent, probe_interval apart, and not answered: as many as fit into this time, and
  // at least 3. A coordinator that was stopped, and sent none meanwhile, takes nothing away.
  absl::Duration shard_loss_timeout = absl::Seconds(10);
  absl::Duration probe_interval = absl::Seconds(1);  // how often a server asks each shard
  TenantLimits tenant_limits;                        // for sessions that are opened, not for those that come back
  uint64_t snapshot_interval_steps = 0;              // between two snapshots of a session; 0: none but those asked for
  // Called once, with the reason, when a shard has said that another coordinator has taken over: this one has stopped
  // then, calls no shard any more and answers Unavailable. On any thread, without a lock. May be empty.
  std::function<void(const absl::Status&)> on_replaced;
};

// Thread-safe; calls block while shards are asked or the journal is written, so that servers run them off their RPC
// threads. Errors are those of session.proto, with an ErrorReason attached; Unavailable as well when the journal cannot
// be written, and then nothing has changed.
class Coordinator {
 public:
  // All references outlive the coordinator.
  Coordinator(CoordinatorOptions options, std::vector<ShardEndpoint> shards, CoordinatorJournal& journal,
              const Clock& clock, Logger& logger, Observer& observer);
  ~Coordinator();

  // Goes on from what the journal holds, in its order, and leads with a fencing token that is greater than those before
  // (ShardControl::BecomeLeader). Before any other call. FailedPrecondition: a session has layers on a shard that is
  // not among this coordinator's; Unavailable: the token cannot be written down.
  absl::Status Restore(absl::Span<const CoordinatorRecord> records);
  // Asks every shard what it holds; installs what it lacks (it was restarted, or a call was lost), puts in quarantine
  // sessions that it does not know, and moves layers away from shards that are lost. A server calls it every now and
  // then, often against shard_loss_timeout; the first time right after Restore. One caller at a time.
  void Reconcile();
  // Asks one shard whether it is there, which lets it go on with sessions that degrade. A server does it for every
  // shard on a thread of its own, as often as Reconcile: a shard that hangs must not keep the others from being asked.
  void ProbeShard(size_t shard);

  // These five are PermissionDenied for a caller that the session's access does not admit, or, where the session is
  // named by its id, that does not show the secret.
  absl::StatusOr<OpenResult> OpenSession(const SessionSpec& spec, const SessionCaller& caller = {});
  // `first_step`: that the worker begins with, or goes on from.
  absl::StatusOr<JoinResult> JoinSession(absl::string_view name, uint32_t rank, uint64_t incarnation,
                                         uint64_t first_step, const SessionCaller& caller = {});
  absl::StatusOr<Directive> ReportStep(const StepReport& report, const SessionCaller& caller = {});
  absl::Status LeaveSession(uint64_t session_id, uint32_t rank, uint64_t incarnation, const SessionCaller& caller = {});
  absl::StatusOr<bool> CloseSession(absl::string_view name, const SessionCaller& caller = {});

  // An operator's choice of the session's mode; nullopt gives it back to the policy. It holds from the first step that
  // no rank has been granted yet.
  absl::StatusOr<CoordinatorSessionSummary> SetMode(absl::string_view name, std::optional<Mode> mode);

  // Has a snapshot of the whole session taken, as of a step that no rank has been granted. It is complete or has failed
  // some time later, see CoordinatorSessionSummary. FailedPrecondition: one is under way; a shard cannot take its part.
  absl::StatusOr<SessionSnapshot> CreateSnapshot(absl::string_view name);
  // Opens a session that begins with factors from outside, as of `step`: no worker can join it before every shard has
  // them (Shard::RestoreLayer). FailedPrecondition: there is one of that name; a shard cannot take part.
  absl::StatusOr<CoordinatorSessionSummary> RestoreSession(const SessionSpec& spec, uint64_t step);

  // --- sessions that this coordinator does not know and its shards keep; see ShardControl::Quarantine
  // Unavailable: a shard does not answer.
  absl::StatusOr<std::vector<QuarantineSummary>> ListQuarantined() const;
  // Takes one into the journal, in a new epoch without members, and has it installed: its factors are
  // those that the shards have. `session_id`: which, of several of that name; 0: the only one. FailedPrecondition:
  // several, or one of that name is open, or shards lack layers of it; NotFound; the errors of ShardControl::Install.
  absl::StatusOr<CoordinatorSessionSummary> AdoptSession(absl::string_view name, uint64_t session_id);
  // Has it deleted, for an operator. Errors as for AdoptSession.
  absl::Status DeleteQuarantined(absl::string_view name, uint64_t session_id);

  std::vector<CoordinatorSessionSummary> ListSessions() const;
  absl::StatusOr<CoordinatorSessionSummary> GetSession(absl::string_view name) const;
  std::vector<std::string> ShardAddresses() const;
  // From now on OpenSession is Unavailable (DRAINING).
  void BeginDrain();
  // Gives up on shards that do not answer: calls under way end as Cancelled, and so will all later ones.
  void CancelShardCalls();

 private:
  absl::Status CheckLeads() const;
  void RestoreEnding(uint64_t session_id, SessionRecord record);
  // `last`: the greatest token of the journal.
  absl::Status BecomeLeader(uint64_t last);
  // A shard has refused a call: another coordinator leads.
  void StepDown(const absl::Status& why);
  std::vector<ShardEndpoint> Watched(std::vector<ShardEndpoint> shards);
  // One operation's hold on a session's entry: waits in the constructor, gives the entry up in the destructor.
  class SessionLock;

  absl::StatusOr<std::shared_ptr<CoordinatorSession>> CreateSession(const SessionSpec& spec, SessionAccess access);
  // SessionBytes, or 0 where there is no limit.
  int64_t CountedBytes(const SessionSpec& spec) const;
  absl::Status CheckTenants(absl::string_view name, const TenantSession& session) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // One entry a shard.
  absl::StatusOr<std::vector<PlacedLayers>> MakePlan(const SessionSpec& spec);
  // Has sessions put in quarantine that this coordinator does not know: its journal is not the one that they are in.
  // Those that it has begun to open and given up are removed: their Install came through later. True when there was
  // one: the description is of before.
  bool ClearOrphans(const ShardEndpoint& shard, const ShardDescription& description);
  absl::StatusOr<QuarantineSummary> FindQuarantined(absl::string_view name, uint64_t session_id) const;
  // The same of what it holds of sessions that have no layers there any more.
  void RemoveLeftovers(size_t shard, const ShardDescription& description);
  // Asks a shard what it holds, grants it its lease and notes that it is there.
  absl::StatusOr<ShardDescription> Probe(size_t shard);
  // Logs that a shard has stopped answering, or answers again, and counts the shards that do not answer.
  void ReportReachability(size_t shard, const absl::Status& probe);
  // Unavailable: the session degrades, and its lock is not to be held for a shard that did not answer the last probe.
  absl::Status CheckAnswers(const SessionSpec& spec, size_t shard) const;
  // Moves the layers of sessions that degrade away from the shards that are lost.
  void ReplaceLostShards(const std::vector<std::optional<ShardDescription>>& shards);
  void MoveLayers(const std::string& name, const std::vector<bool>& lost,
                  const std::vector<std::optional<ShardDescription>>& shards);
  // Where these layers go, of the shards that have a description. ResourceExhausted: none has room, with the numbers.
  absl::StatusOr<std::vector<PlacedLayers>> MakeMove(const CoordinatorSession& session,
                                                     const std::vector<uint32_t>& layers,
                                                     const std::vector<std::optional<ShardDescription>>& shards) const;
  // Writes down and adopts where the layers are in the next epoch, which it returns.
  absl::StatusOr<uint64_t> WriteMove(CoordinatorSession& session, const std::vector<PlacedLayers>& placement);
  // `failed`, when not null: the shard that an error comes from.
  absl::Status InstallOnShards(const std::vector<SessionInstall>& installs,
                               std::optional<size_t>* failed = nullptr) const;
  absl::Status RemoveFromShards(uint64_t session_id, const std::vector<PlacedLayers>& placement) const;
  // Has one shard remove what it has of a session that ends, unless it has said that it did.
  absl::Status RemoveEnding(uint64_t session_id, size_t shard);
  // Has it remove what it has of all sessions that end.
  void RemoveEnding(size_t shard, const ShardDescription& description);
  // Writes down of the sessions that end which ones every shard has removed.
  void CloseRemoved();
  // Has the session's factors held again, before a step in second order is promised. An error: not by every shard.
  absl::Status HoldFactors(CoordinatorSession& session);
  // Has factors released, or held, where the shard does not do what the sessions need.
  void ReconcileFactors(size_t shard, const ShardDescription& description);
  absl::Status SendFactorHold(const CoordinatorSession& session, size_t shard, const FactorHold& hold);
  // While the caller holds the session's lock.
  absl::StatusOr<SessionSnapshot> BeginSnapshot(CoordinatorSession& session);
  // Writes the snapshot down and tells the shards, while the caller holds the session's lock.
  absl::Status OrderSnapshot(CoordinatorSession& session, const SessionSnapshot& planned);
  // Asks the shards how far a snapshot under way is, begins one that is due.
  void CompleteSnapshots();
  // The snapshot as its shards say; `again`: all of them have heard of it.
  SessionSnapshot AskForParts(const CoordinatorSession& session, SessionSnapshot snapshot, bool again);
  // Writes down and adopts what has become of a snapshot, while the caller holds the session's lock.
  absl::Status WriteSnapshot(CoordinatorSession& session, const SessionSnapshot& snapshot);
  // Tells the observer of the last complete one.
  void ShowLastSnapshot(absl::string_view name, const std::vector<SessionSnapshot>& snapshots);
  // Tells the session's shards of its membership, while the caller holds the session's lock. `failed`: see
  // InstallOnShards.
  absl::Status TellShards(CoordinatorSession& session, std::optional<size_t>* failed = nullptr);
  // Ends the epochs before this one on the shards, and learns whether the job has to go back.
  absl::Status FenceEpoch(CoordinatorSession& session);
  // Installs the session on one shard again, unless it has gone meanwhile.
  void Reinstall(const std::string& name, size_t shard);
  // Plans a change of the session, writes its record down and has the session adopt it, before anything else is
  // written. `plan` is called under mu_; what it reads stays so until then.
  absl::Status WriteChange(CoordinatorSession& session, absl::FunctionRef<CoordinatorRecord()> plan);
  // Writes down and adopts who holds the ranks, while the caller holds the session's lock.
  absl::Status WriteMembership(CoordinatorSession& session, const Membership& next);
  // Writes down what the session wants to grant, if anything.
  void WriteLease(CoordinatorSession& session);
  // The records of all sessions, for a compaction.
  void AddRecords(std::vector<CoordinatorRecord>& records) const;
  std::shared_ptr<CoordinatorSession> Find(uint64_t session_id) const;
  void PublishCount();

  std::atomic<bool> replaced_ = false;  // by another coordinator

  // Const after construction.
  const CoordinatorOptions options_;
  const std::vector<ShardEndpoint> shards_;
  const Clock& clock_;
  Logger& logger_;
  Observer& observer_;

  // Own synchronization. The journal's lock comes before mu_, the watch's after it.
  ShardWatch watch_;
  JournalWriter journal_;

  mutable Mutex mu_;
  CondVar entry_freed_;
  SessionTable sessions_ ABSL_GUARDED_BY(mu_);
  SessionIds ids_ ABSL_GUARDED_BY(mu_);
  // By id: shards may hear of these, and sessions_ gets them when they are durable.
  std::map<uint64_t, TenantSession> opening_ ABSL_GUARDED_BY(mu_);
  EndingSessions ending_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool leads_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
