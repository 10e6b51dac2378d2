// SPDX-License-Identifier: Apache-2.0
// Steps and inspection. coordinator_opening.cc opens and closes sessions; coordinator_members.cc handles their ranks.
#include "server/core/coordinator/coordinator.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator_context.h"
#include "server/core/coordinator/coordinator_session.h"

namespace precondor {

Coordinator::Coordinator(CoordinatorOptions options, std::vector<ShardEndpoint> shards, CoordinatorJournal& journal,
                         const Clock& clock, Logger& logger, Observer& observer)
    : context_(std::make_unique<CoordinatorContext>(std::move(options), std::move(shards), journal, clock, logger,
                                                    observer)) {}

Coordinator::~Coordinator() = default;

// --- steps -----------------------------------------------------------------------------------------------------------

void WriteLease(CoordinatorContext& c, CoordinatorSession& session) {
  std::optional<LeaseTerms> lease;
  std::vector<ModeInterval> before;
  FallbackDecision decision;
  {
    MutexLock lock(c.mu);
    lease = session.BeginLeaseWrite();
    if (!lease.has_value()) return;
    before = session.leases().durable().schedule;
    decision = session.decision();
  }
  const absl::Status written = c.Write(session, LeaseRecord{.session_id = session.id, .lease = *lease});
  if (!written.ok() || before == lease->schedule) return;
  const ModeInterval& last = lease->schedule.back();
  c.observer.OnModeChange(session.spec.name, last.mode);
  // The audit log: the decision and its numbers.
  c.logger.Log(Severity::kInfo, "mode changes",
               {{"session", session.spec.name},
                {"mode", ModeName(last.mode)},
                {"from_step", last.first_step},
                {"rule", FallbackReasonName(decision.reason)},
                {"reason", decision.sentence},
                {"step", decision.state.last_step},
                {"loss", decision.state.trend.loss},
                {"rate", decision.state.trend.rate},
                {"threshold_rate", decision.threshold_rate},
                {"phase_steps", decision.state.trend.phase_steps},
                {"streak_steps", static_cast<int64_t>(decision.state.streak_steps)}});
}

absl::StatusOr<Directive> Coordinator::ReportStep(const StepReport& report, const SessionCaller& caller) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  const std::shared_ptr<CoordinatorSession> session = c.Find(report.session_id);
  if (session == nullptr) return NoSession(report.session_id);
  if (!session->access.IsShownBy(caller)) return NotTheirs(report.session_id);
  std::optional<LossTable::StepLoss> finished;
  {
    MutexLock lock(c.mu);
    PRECONDOR_ASSIGN_OR_RETURN(finished, session->Report(report, c.clock.Now() - report.ago));
  }
  WriteLease(c, *session);
  Directive directive;
  Mode mode = Mode::kSecondOrder;
  FallbackDecision decision;
  {
    MutexLock lock(c.mu);
    directive = MakeDirective(*session);
    mode = LastMode(*session);
    decision = session->decision();
  }
  if (!finished.has_value()) return directive;
  const std::string& name = session->spec.name;
  c.observer.OnStepReported(name, finished->step, finished->loss, mode);
  c.observer.OnDecision(name, decision);
  c.observer.OnLease(name, directive.lease_through_step);
  c.logger.Log(Severity::kDebug, "step reported by all",
               {{"session", name},
                {"step", finished->step},
                {"loss", finished->loss},
                {"samples", finished->samples},
                {"finite_ranks", finished->finite}});
  return directive;
}

absl::StatusOr<CoordinatorSessionSummary> Coordinator::SetMode(absl::string_view name, std::optional<Mode> mode) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  const SessionLock locked(c, name);
  if (locked.session() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  CoordinatorSession& session = *locked.session();
  std::string why;
  if (mode == Mode::kFirstOrder) {
    PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(session.spec, c.options.make_method));
    why = WhyNoFirstOrder(session.spec, methods);
  }
  if (!why.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "session \"", name, "\": expected mode ", ModeName(Mode::kSecondOrder), ", got ", ModeName(*mode), ": ", why));
  }
  {
    MutexLock lock(c.mu);
    session.Force(mode);
  }
  WriteLease(c, session);
  MutexLock lock(c.mu);
  return MakeSummary(session);
}

// --- inspection -----------------------------------------------------------------------------------------------------

std::vector<CoordinatorSessionSummary> Coordinator::ListSessions() const {
  const CoordinatorContext& c = *context_;
  std::vector<CoordinatorSessionSummary> summaries;
  MutexLock lock(c.mu);
  for (const auto& [id, session] : c.state.open) summaries.push_back(MakeSummary(*session));
  return summaries;
}

absl::StatusOr<CoordinatorSessionSummary> Coordinator::GetSession(absl::string_view name) const {
  const CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  MutexLock lock(c.mu);
  const std::shared_ptr<CoordinatorSession> session = c.state.FindByName(name);
  if (session == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  return MakeSummary(*session);
}

std::vector<std::string> Coordinator::ShardAddresses() const {
  std::vector<std::string> addresses;
  for (const ShardEndpoint& shard : context_->shards) {
    const std::string own = shard.control->own_address();
    addresses.push_back(own.empty() ? shard.address : own);
  }
  return addresses;
}

void Coordinator::BeginDrain() {
  MutexLock lock(context_->mu);
  context_->state.draining = true;
}

void Coordinator::CancelShardCalls() {
  for (const ShardEndpoint& shard : context_->shards) shard.control->CancelCalls();
}

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
