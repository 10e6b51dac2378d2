// SPDX-License-Identifier: Apache-2.0
// Steps and inspection. coordinator_opening.cc opens and closes sessions; coordinator_members.cc handles their ranks.
#include "server/core/coordinator/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator_errors.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/coordinator/session_messages.h"

namespace precondor {

Coordinator::Coordinator(CoordinatorOptions options, std::vector<ShardEndpoint> shards, CoordinatorJournal& journal,
                         const Clock& clock, Logger& logger, Observer& observer)
    : options_(std::move(options)),
      shards_(Watched(std::move(shards))),
      clock_(clock),
      logger_(logger),
      observer_(observer),
      watch_(shards_.size(), options_.probe_interval, clock.Now()),
      journal_(
          journal, [this](std::vector<CoordinatorRecord>& records) { AddRecords(records); }, logger, observer),
      ending_(shards_.size()),
      leads_(!options_.standby) {}

Coordinator::~Coordinator() = default;

// --- steps -----------------------------------------------------------------------------------------------------------

std::shared_ptr<CoordinatorSession> Coordinator::Find(uint64_t session_id) const {
  MutexLock lock(mu_);
  return sessions_.Find(session_id);
}

absl::StatusOr<Directive> Coordinator::ReportStep(const StepReport& report, const SessionCaller& caller) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  const std::shared_ptr<CoordinatorSession> session = Find(report.session_id);
  if (session == nullptr) return NoSession(report.session_id);
  if (!session->access().IsShownBy(caller)) return NotTheirs(report.session_id);
  std::optional<LossTable::StepLoss> finished;
  {
    MutexLock lock(mu_);
    PRECONDOR_ASSIGN_OR_RETURN(finished, session->Report(report, clock_.Now()));
  }
  WriteLease(*session);
  Directive directive;
  Mode mode = Mode::kSecondOrder;
  FallbackDecision decision;
  {
    MutexLock lock(mu_);
    directive = MakeDirective(*session);
    mode = LastMode(*session);
    decision = session->mode_policy().decision();
  }
  if (!finished.has_value()) return directive;
  const std::string& name = session->spec().name;
  observer_.OnStepReported(name, finished->step, finished->loss, mode);
  observer_.OnDecision(name, decision);
  observer_.OnLease(name, directive.lease_through_step);
  logger_.Log(Severity::kDebug, "step reported by all",
              {{"session", name},
               {"step", finished->step},
               {"loss", finished->loss},
               {"samples", finished->samples},
               {"finite_ranks", finished->finite}});
  return directive;
}

absl::StatusOr<CoordinatorSessionSummary> Coordinator::SetMode(absl::string_view name, std::optional<Mode> mode) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  SessionLock locked(*this, name, /*create=*/false);
  if (locked.state() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  CoordinatorSession& session = *locked.state();
  const std::string why = mode == Mode::kFirstOrder ? WhyNoFirstOrder(session.spec()) : "";
  if (!why.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "session \"", name, "\": expected mode ", ModeName(Mode::kSecondOrder), ", got ", ModeName(*mode), ": ", why));
  }
  {
    MutexLock lock(mu_);
    session.Force(mode);
  }
  WriteLease(session);
  MutexLock lock(mu_);
  return MakeSummary(session);
}

// --- inspection -----------------------------------------------------------------------------------------------------

std::vector<CoordinatorSessionSummary> Coordinator::ListSessions() const {
  std::vector<CoordinatorSessionSummary> summaries;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : sessions_.by_id()) summaries.push_back(MakeSummary(*session));
  }
  std::sort(summaries.begin(), summaries.end(),
            [](const auto& x, const auto& y) { return x.session_id < y.session_id; });
  return summaries;
}

absl::StatusOr<CoordinatorSessionSummary> Coordinator::GetSession(absl::string_view name) const {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  MutexLock lock(mu_);
  const std::shared_ptr<CoordinatorSession> session = sessions_.FindByName(name);
  if (session == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  return MakeSummary(*session);
}

std::vector<std::string> Coordinator::ShardAddresses() const {
  std::vector<std::string> addresses;
  for (const ShardEndpoint& shard : shards_) {
    const std::string own = shard.control->own_address();
    addresses.push_back(own.empty() ? shard.address : own);
  }
  return addresses;
}

void Coordinator::BeginDrain() {
  MutexLock lock(mu_);
  draining_ = true;
}

void Coordinator::CancelShardCalls() {
  for (const ShardEndpoint& shard : shards_) shard.control->CancelCalls();
}

void Coordinator::PublishCount() {
  MutexLock lock(mu_);
  observer_.OnCoordinatorSessions(static_cast<int64_t>(sessions_.by_id().size()));
}

}  // namespace precondor
