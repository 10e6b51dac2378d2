// SPDX-License-Identifier: Apache-2.0
#include "server/core/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator_session.h"
#include "server/core/placement_input.h"
#include "server/policy/placement.h"

namespace precondor {
namespace {

using absl::StatusCode;

absl::Status NoSession(const absl::AlphaNum& which) {
  return ReasonedStatus(StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session ", which, ": there is none on this coordinator"));
}

// The description with its defaults filled in; two that mean the same are then equal.
SessionSpec FillDefaults(SessionSpec spec) {
  if (spec.statistics == StatisticsKind::kSigned) spec.sketches = static_cast<int32_t>(VectorsPerWorker(spec));
  return spec;
}

absl::Status AddContext(const absl::Status& status, const std::string& context) {
  if (status.ok()) return status;
  return ReasonedStatus(status.code(), GetErrorReason(status), absl::StrCat(context, ": ", status.message()));
}

}  // namespace

class Coordinator::Turn {
 public:
  // `create`: make a place for a name that has none. Without it has_place() may be false.
  Turn(Coordinator& coordinator, absl::string_view name, bool create) : coordinator_(coordinator), name_(name) {
    MutexLock lock(coordinator_.mu_);
    for (;;) {
      auto found = coordinator_.places_.find(name_);
      if (found == coordinator_.places_.end()) {
        if (!create) return;
        found = coordinator_.places_.emplace(name_, Place()).first;
      }
      if (!found->second.busy) {
        found->second.busy = true;
        has_place_ = true;
        state_ = found->second.state;
        return;
      }
      coordinator_.place_freed_.wait(coordinator_.mu_);
    }
  }
  ~Turn() {
    if (!has_place_) return;
    {
      MutexLock lock(coordinator_.mu_);
      auto found = coordinator_.places_.find(name_);
      found->second.busy = false;
      found->second.state = state_;
      if (state_ == nullptr) coordinator_.places_.erase(found);
    }
    coordinator_.place_freed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  // Null: there is no such session.
  const std::shared_ptr<CoordinatorSession>& state() const { return state_; }
  // Takes effect when the turn ends.
  void SetState(std::shared_ptr<CoordinatorSession> state) { state_ = std::move(state); }

 private:
  Coordinator& coordinator_;
  const std::string name_;
  bool has_place_ = false;
  std::shared_ptr<CoordinatorSession> state_;
};

Coordinator::Coordinator(CoordinatorOptions options, std::vector<ShardEndpoint> shards, const Clock& clock,
                         Logger& logger, Observer& observer)
    : options_(std::move(options)), shards_(std::move(shards)), clock_(clock), logger_(logger), observer_(observer) {}

Coordinator::~Coordinator() = default;

// --- opening and closing --------------------------------------------------------------------------------------------

absl::StatusOr<OpenResult> Coordinator::OpenSession(const SessionSpec& spec) {
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(spec));
  if (spec.exchange != ExchangeMode::kDirect && spec.exchange != ExchangeMode::kDelegate) {
    return absl::UnimplementedError(absl::StrCat("session \"", spec.name, "\": exchange mode ",
                                                 ExchangeModeName(spec.exchange),
                                                 " is not served; expected DIRECT or DELEGATE"));
  }
  PRECONDOR_RETURN_IF_ERROR(options_.make_method(spec.method).status());
  {
    MutexLock lock(mu_);
    if (draining_) {
      return ReasonedStatus(StatusCode::kUnavailable, ErrorReason::kDraining,
                            absl::StrCat("session \"", spec.name, "\": the server is draining"));
    }
  }
  const SessionSpec filled = FillDefaults(spec);
  Turn turn(*this, spec.name, /*create=*/true);
  if (turn.state() == nullptr) {
    PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<CoordinatorSession> session, CreateSession(filled));
    observer_.OnSessionOpened(filled.name);
    observer_.OnEpoch(filled.name, session->epoch(), 0, filled.world_size);
    turn.SetState(session);
    PublishCount();
    return OpenResult{.session_id = session->id(), .created = true, .spec = filled};
  }
  if (const std::string difference = DescribeDifference(turn.state()->spec(), filled); !difference.empty()) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch,
                          absl::StrCat("session \"", spec.name, "\" exists with another description: ", difference));
  }
  return OpenResult{.session_id = turn.state()->id(), .created = false, .spec = turn.state()->spec()};
}

uint64_t Coordinator::NextSessionId() {
  // From the clock, so that a coordinator that lost its table does not give an old number out again.
  const int64_t now = absl::ToUnixNanos(clock_.Now());
  last_session_id_ = std::max(last_session_id_ + 1, static_cast<uint64_t>(std::max<int64_t>(now, 1)));
  return last_session_id_;
}

absl::StatusOr<std::shared_ptr<CoordinatorSession>> Coordinator::CreateSession(const SessionSpec& spec) {
  uint64_t id = 0;
  {
    MutexLock lock(mu_);
    id = NextSessionId();
    opening_.insert(id);
  }
  const auto opened = absl::MakeCleanup([this, id] {
    MutexLock lock(mu_);
    opening_.erase(id);
  });
  PRECONDOR_ASSIGN_OR_RETURN(Plan plan, MakePlan(spec));
  auto session = std::make_shared<CoordinatorSession>(id, spec, std::move(plan.shard_map),
                                                      std::move(plan.layers_of_shard), options_.lease_steps);
  if (absl::Status installed = InstallOnShards(session->MakeInstalls()); !installed.ok()) {
    if (absl::Status removed = RemoveFromShards(id, session->layers_of_shard()); !removed.ok()) {
      logger_.Log(Severity::kError, "could not take a failed session back",
                  {{"session", spec.name}, {"session_id", id}, {"reason", absl::string_view(removed.message())}});
    }
    return installed;
  }
  {
    MutexLock lock(mu_);
    by_id_.emplace(id, session);
  }
  logger_.Log(Severity::kInfo, "session opened",
              {{"session", spec.name},
               {"session_id", id},
               {"layers", static_cast<uint64_t>(spec.layers.size())},
               {"shards", static_cast<uint64_t>(session->shard_map().size())},
               {"world_size", spec.world_size}});
  return session;
}

absl::StatusOr<Coordinator::Plan> Coordinator::MakePlan(const SessionSpec& spec) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::unique_ptr<Method> method, options_.make_method(spec.method));
  for (const std::string& warning : method->Warnings(VectorsPerStep(spec))) {
    logger_.Log(Severity::kWarning, warning, {{"session", spec.name}, {"method", method->name()}});
  }
  std::vector<PlacementShard> room;
  std::vector<std::string> addresses;
  std::vector<MeasuredCost> costs;
  for (const ShardEndpoint& shard : shards_) {
    absl::StatusOr<ShardDescription> description = shard.control->Describe();
    if (!description.ok()) {
      return AddContext(description.status(), absl::StrCat("session \"", spec.name, "\", shard ", shard.address));
    }
    RemoveOrphans(shard, *description);
    room.push_back({.free_bytes = description->capacity_bytes - description->reserved_bytes});
    addresses.push_back(description->advertise_address.empty() ? shard.address : description->advertise_address);
    costs.insert(costs.end(), description->costs.begin(), description->costs.end());
  }
  const Placement placement = PlaceLayers(EstimateLayers(spec, *method, costs), room);
  if (!placement.feasible) {
    return ReasonedStatus(StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", spec.name, "\": ", placement.reason));
  }
  Plan plan;
  plan.layers_of_shard.resize(shards_.size());
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    plan.layers_of_shard[placement.shard_of_layer[layer]].push_back(layer);
  }
  for (size_t s = 0; s < shards_.size(); ++s) {
    if (plan.layers_of_shard[s].empty()) continue;
    plan.shard_map.push_back({.address = addresses[s], .layers = plan.layers_of_shard[s]});
  }
  logger_.Log(Severity::kInfo, "layers placed", {{"session", spec.name}, {"reason", placement.reason}});
  return plan;
}

void Coordinator::RemoveOrphans(const ShardEndpoint& shard, ShardDescription& description) {
  for (const HeldSession& held : description.sessions) {
    {
      MutexLock lock(mu_);
      if (by_id_.contains(held.session_id) || opening_.contains(held.session_id)) continue;
    }
    const absl::Status removed = shard.control->Remove(held.session_id).status();
    if (removed.ok()) description.reserved_bytes -= held.reserved_bytes;
    logger_.Log(
        Severity::kWarning, removed.ok() ? "orphaned session removed" : "orphaned session stays",
        {{"session", held.name},
         {"session_id", held.session_id},
         {"shard", shard.address},
         {"reserved_bytes", held.reserved_bytes},
         {"reason", removed.ok() ? "this coordinator does not know it" : absl::string_view(removed.message())}});
  }
}

absl::Status Coordinator::InstallOnShards(const std::vector<SessionInstall>& installs) const {
  for (size_t s = 0; s < installs.size(); ++s) {
    if (installs[s].layers.empty()) continue;
    const absl::Status status = shards_[s].control->Install(installs[s]).status();
    if (!status.ok()) {
      return AddContext(status, absl::StrCat("session \"", installs[s].spec.name, "\", shard ", shards_[s].address));
    }
  }
  return absl::OkStatus();
}

absl::Status Coordinator::RemoveFromShards(uint64_t session_id,
                                           const std::vector<std::vector<uint32_t>>& layers_of_shard) const {
  absl::Status first;
  for (size_t s = 0; s < layers_of_shard.size(); ++s) {
    if (layers_of_shard[s].empty()) continue;
    const absl::Status status = shards_[s].control->Remove(session_id).status();
    // All are asked, so that one that is gone does not keep the others' memory.
    if (first.ok() && !status.ok()) {
      first = AddContext(status, absl::StrCat("session_id ", session_id, ", shard ", shards_[s].address));
    }
  }
  return first;
}

absl::StatusOr<bool> Coordinator::CloseSession(absl::string_view name) {
  Turn turn(*this, name, /*create=*/false);
  if (turn.state() == nullptr) return false;
  const uint64_t id = turn.state()->id();
  // Kept when a shard does not answer, so that closing can be repeated.
  PRECONDOR_RETURN_IF_ERROR(RemoveFromShards(id, turn.state()->layers_of_shard()));
  {
    MutexLock lock(mu_);
    by_id_.erase(id);
  }
  turn.SetState(nullptr);
  PublishCount();
  observer_.OnSessionClosed(name);
  logger_.Log(Severity::kInfo, "session closed", {{"session", name}, {"session_id", id}});
  return true;
}

// --- members --------------------------------------------------------------------------------------------------------

absl::StatusOr<JoinResult> Coordinator::JoinSession(absl::string_view name, uint32_t rank, uint64_t incarnation) {
  Turn turn(*this, name, /*create=*/false);
  if (turn.state() == nullptr) return NoSession(absl::StrCat("\"", name, "\""));
  CoordinatorSession& session = *turn.state();
  std::vector<SessionInstall> installs;
  uint64_t epoch = 0;
  uint32_t joined = 0;
  {
    MutexLock lock(mu_);
    PRECONDOR_ASSIGN_OR_RETURN(const bool tell_shards, session.Join(rank, incarnation));
    epoch = session.epoch();
    joined = session.joined();
    if (tell_shards) installs = session.MakeInstalls();
  }
  if (!installs.empty()) {
    // On failure the rank stays joined and the shards untold: the next join tells them.
    PRECONDOR_RETURN_IF_ERROR(InstallOnShards(installs));
    observer_.OnEpoch(name, epoch, joined, session.spec().world_size);
    logger_.Log(Severity::kInfo, "rank joined",
                {{"session", name},
                 {"rank", rank},
                 {"incarnation", incarnation},
                 {"epoch", epoch},
                 {"joined", joined},
                 {"world_size", session.spec().world_size}});
  }
  MutexLock lock(mu_);
  if (!installs.empty()) session.NoteShardsTold(epoch, joined);
  return JoinResult{.session_id = session.id(),
                    .epoch = session.epoch(),
                    .active = session.active(),
                    .shard_map = session.shard_map(),
                    .directive = session.directive(),
                    .spec = session.spec()};
}

absl::Status Coordinator::LeaveSession(uint64_t session_id, uint32_t rank, uint64_t incarnation) {
  std::string name;
  {
    MutexLock lock(mu_);
    auto found = by_id_.find(session_id);
    if (found == by_id_.end()) return NoSession(session_id);
    CoordinatorSession& session = *found->second;
    PRECONDOR_RETURN_IF_ERROR(session.Leave(rank, incarnation));
    name = session.spec().name;
    observer_.OnEpoch(name, session.epoch(), session.joined(), session.spec().world_size);
  }
  logger_.Log(Severity::kInfo, "rank left", {{"session", name}, {"rank", rank}, {"incarnation", incarnation}});
  return absl::OkStatus();
}

absl::StatusOr<Directive> Coordinator::ReportStep(const StepReport& report) {
  std::optional<LossTable::StepLoss> finished;
  Directive directive;
  Mode mode = Mode::kSecondOrder;
  std::string name;
  {
    MutexLock lock(mu_);
    auto found = by_id_.find(report.session_id);
    if (found == by_id_.end()) return NoSession(report.session_id);
    CoordinatorSession& session = *found->second;
    PRECONDOR_ASSIGN_OR_RETURN(finished, session.Report(report));
    directive = session.directive();
    mode = session.mode();
    name = session.spec().name;
  }
  if (!finished.has_value()) return directive;
  observer_.OnStepReported(name, finished->step, finished->loss, mode);
  logger_.Log(Severity::kDebug, "step reported by all",
              {{"session", name},
               {"step", finished->step},
               {"loss", finished->loss},
               {"samples", finished->samples},
               {"finite_ranks", finished->finite}});
  return directive;
}

// --- inspection -----------------------------------------------------------------------------------------------------

std::vector<CoordinatorSessionSummary> Coordinator::ListSessions() const {
  std::vector<CoordinatorSessionSummary> summaries;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : by_id_) summaries.push_back(session->summary());
  }
  std::sort(summaries.begin(), summaries.end(),
            [](const auto& x, const auto& y) { return x.session_id < y.session_id; });
  return summaries;
}

std::vector<std::string> Coordinator::ShardAddresses() const {
  std::vector<std::string> addresses;
  for (const ShardEndpoint& shard : shards_) addresses.push_back(shard.address);
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
  observer_.OnCoordinatorSessions(static_cast<int64_t>(by_id_.size()));
}

}  // namespace precondor
