// SPDX-License-Identifier: Apache-2.0
// How sessions are opened, placed on shards, and closed.
#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_memory.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_errors.h"
#include "server/core/coordinator/coordinator_session.h"
#include "server/core/coordinator/session_lock.h"
#include "server/core/coordinator/session_messages.h"
#include "server/core/resources/placement_input.h"
#include "server/core/resources/reservation.h"
#include "server/policy/placement.h"

namespace precondor {
namespace {

using absl::StatusCode;

// Returns the spec with its defaults filled in, so that two specs that mean the same are equal.
SessionSpec FillDefaults(SessionSpec spec) {
  if (UsesSketches(spec)) spec.sketches = SketchesPerWorker(spec);
  return spec;
}

// Returns the methods' warnings about the configuration, each once.
std::vector<std::pair<const Method*, std::string>> Warnings(const SessionSpec& spec, const MethodSet& methods) {
  std::vector<std::pair<const Method*, std::string>> warnings;
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    const Method& method = methods.of(layer);
    for (std::string& warning : method.Warnings(VectorsPerStep(spec, layer))) {
      std::pair<const Method*, std::string> one(&method, std::move(warning));
      if (!absl::c_linear_search(warnings, one)) warnings.push_back(std::move(one));
    }
  }
  return warnings;
}

absl::Status CheckRankDevices(const SessionSpec& spec, absl::Span<const std::string> rank_devices) {
  constexpr size_t kMostBytes = 64;
  if (!rank_devices.empty() && rank_devices.size() != static_cast<size_t>(spec.world_size)) {
    return absl::InvalidArgumentError(absl::StrCat("session \"", spec.name, "\": rank_devices: expected none or ",
                                                   spec.world_size, ", got ", rank_devices.size()));
  }
  for (const std::string& device : rank_devices) {
    if (device.size() <= kMostBytes) continue;
    return absl::InvalidArgumentError(absl::StrCat("session \"", spec.name, "\": rank_devices: expected at most ",
                                                   kMostBytes, " bytes, got ", device.size()));
  }
  return absl::OkStatus();
}

bool MayClose(const CoordinatorSession& session, const SessionCaller& caller) {
  return caller.is_operator || session.access().Admits(caller);
}

}  // namespace

absl::StatusOr<OpenResult> Coordinator::OpenSession(const SessionSpec& spec, const SessionCaller& caller,
                                                    absl::Span<const std::string> rank_devices) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(spec));
  PRECONDOR_RETURN_IF_ERROR(CheckRankDevices(spec, rank_devices));
  PRECONDOR_RETURN_IF_ERROR(MethodSet::Make(spec, options_.make_method).status());
  if (spec.fallback.policy != FallbackPolicy::kNever) {
    const std::string why = WhyNoFirstOrder(spec);
    if (!why.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("session \"", spec.name, "\": fallback: expected policy ",
                                                     FallbackPolicyName(FallbackPolicy::kNever), ", got ",
                                                     FallbackPolicyName(spec.fallback.policy), ": ", why));
    }
  }
  {
    MutexLock lock(mu_);
    if (draining_) {
      return ReasonedStatus(StatusCode::kUnavailable, ErrorReason::kDraining,
                            absl::StrCat("session \"", spec.name, "\": the server is draining"));
    }
  }
  SessionSpec filled = FillDefaults(spec);
  SessionLock locked(*this, spec.name, /*create=*/true);
  if (locked.state() == nullptr) {
    PRECONDOR_ASSIGN_OR_RETURN(std::shared_ptr<CoordinatorSession> session,
                               CreateSession(filled, SessionAccess::Make(caller), rank_devices));
    observer_.OnSessionOpened(filled.name);
    observer_.OnEpoch(filled.name, session->members().epoch(), 0, filled.world_size);
    locked.SetState(session);
    PublishCount();
    return OpenResult{
        .session_id = session->id(), .created = true, .spec = session->spec(), .secret = session->access().secret};
  }
  // Before the specs are compared: the difference would reveal another tenant's spec.
  if (!locked.state()->access().IsForTenantOf(caller)) return NotTheirs(absl::StrCat("\"", spec.name, "\""));
  if (filled.delegates.empty()) filled.delegates = locked.state()->spec().delegates;  // the coordinator's choice
  if (const std::string difference = DescribeDifference(locked.state()->spec(), filled); !difference.empty()) {
    return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch,
                          absl::StrCat("session \"", spec.name, "\" exists with another description: ", difference));
  }
  return OpenResult{.session_id = locked.state()->id(),
                    .created = false,
                    .spec = locked.state()->spec(),
                    .secret = locked.state()->access().secret};
}

absl::StatusOr<std::shared_ptr<CoordinatorSession>> Coordinator::CreateSession(
    SessionSpec spec, SessionAccess access, absl::Span<const std::string> rank_devices) {
  const TenantSession counted{
      .tenants = access.tenants, .bytes = CountedBytes(spec), .table_bytes = SessionTableBytes(spec)};
  uint64_t id = 0;
  {
    MutexLock lock(mu_);
    PRECONDOR_RETURN_IF_ERROR(CheckTenants(spec.name, counted));
    PRECONDOR_RETURN_IF_ERROR(CheckTables(spec.name, counted.table_bytes));
    id = ids_.Next(clock_.Wall());
    opening_[id] = counted;
  }
  const auto opened = absl::MakeCleanup([this, id] {
    MutexLock lock(mu_);
    opening_.erase(id);
  });
  PRECONDOR_ASSIGN_OR_RETURN(Plan plan, MakePlan(spec, rank_devices));
  spec.delegates = std::move(plan.delegates);
  SessionRecord record{.session_id = id,
                       .spec = spec,
                       .placement = std::move(plan.placement),
                       .membership = SessionMembers::First(spec),
                       .lease = StepLeases::First(spec, options_.lease_steps),
                       .access = std::move(access)};
  auto session = std::make_shared<CoordinatorSession>(record, options_.lease_steps, counted.bytes);
  absl::Status status = InstallOnShards(MakeInstalls(*session));
  if (status.ok()) {
    status = journal_.Write([&] { return record; },
                            [&] {
                              MutexLock lock(mu_);
                              sessions_.Add(session);
                            });
  }
  if (!status.ok()) {
    {
      MutexLock lock(mu_);
      ids_.Abandon(id);
    }
    if (absl::Status removed = RemoveFromShards(id, session->placement().shards()); !removed.ok()) {
      logger_.Log(Severity::kError, "cannot remove a session that failed to open",
                  {{"session", spec.name}, {"session_id", id}, {"reason", absl::string_view(removed.message())}});
    }
    return status;
  }
  logger_.Log(Severity::kInfo, "session opened",
              {{"session", spec.name},
               {"session_id", id},
               {"layers", static_cast<uint64_t>(spec.layers.size())},
               {"shards", static_cast<uint64_t>(MakeSummary(*session).shard_map.size())},
               {"world_size", spec.world_size}});
  return session;
}

std::string Coordinator::WhyNoFirstOrder(const SessionSpec& spec) const {
  const absl::StatusOr<MethodSet> methods = MethodSet::Make(spec, options_.make_method);
  if (!methods.ok()) return "";
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    const Method& method = methods->of(static_cast<int64_t>(layer));
    if (!method.traits().whole_updates) continue;
    return absl::StrCat(
        "layer \"", spec.layers[layer].name, "\" has the method ", method.name(),
        ", whose answers are whole updates; in first order it would get its averaged gradient, which is "
        "plain gradient descent at the rate of those updates");
  }
  return "";
}

absl::Status Coordinator::CheckTables(absl::string_view name, int64_t bytes) const {
  if (options_.table_bytes == 0) return absl::OkStatus();
  int64_t held = 0;
  for (const auto& [id, other] : sessions_.by_id()) held += SessionTableBytes(other->spec());
  for (const auto& [id, other] : opening_) {
    if (sessions_.Find(id) == nullptr) held += other.table_bytes;
  }
  if (bytes <= options_.table_bytes - held) return absl::OkStatus();
  return ReasonedStatus(StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                        absl::StrCat("session \"", name, "\": the coordinator keeps ", options_.table_bytes,
                                     " bytes of descriptions and ranks (memory_limit), has ", held, " in ",
                                     sessions_.by_id().size(), " sessions, and needs ", bytes, " more"));
}

int64_t Coordinator::CountedBytes(const SessionSpec& spec) const {
  if (options_.tenant_limits.bytes == 0) return 0;
  const absl::StatusOr<MethodSet> methods = MethodSet::Make(spec, options_.make_method);
  return methods.ok() ? SessionBytes(spec, *methods) : 0;  // an open session's methods are valid
}

absl::Status Coordinator::CheckTenants(absl::string_view name, const TenantSession& session) const {
  if (!options_.tenant_limits.any()) return absl::OkStatus();
  std::vector<TenantSession> others;
  for (const auto& [id, other] : sessions_.by_id()) others.push_back({other->access().tenants, other->bytes()});
  for (const auto& [id, other] : opening_) {
    if (sessions_.Find(id) == nullptr) others.push_back(other);
  }
  return CheckTenantLimits(options_.tenant_limits, name, session, others);
}

absl::StatusOr<Coordinator::Plan> Coordinator::MakePlan(const SessionSpec& spec,
                                                        absl::Span<const std::string> rank_devices) {
  PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(spec, options_.make_method));
  for (const auto& [method, warning] : Warnings(spec, methods)) {
    logger_.Log(Severity::kWarning, warning, {{"session", spec.name}, {"method", method->name()}});
  }
  std::vector<PlacementShard> rooms;
  Plan plan{.placement = {}, .delegates = spec.delegates};
  for (const ShardEndpoint& shard : shards_) {
    absl::StatusOr<ShardDescription> description = shard.control->Describe();
    if (!description.ok()) {
      return AddContext(description.status(), absl::StrCat("session \"", spec.name, "\", shard ", shard.address));
    }
    if (ClearOrphans(shard, *description)) {  // its devices have other free bytes now
      description = shard.control->Describe();
      if (!description.ok()) {
        return AddContext(description.status(), absl::StrCat("session \"", spec.name, "\", shard ", shard.address));
      }
    }
    absl::c_copy(DeviceRooms(*description, plan.placement.size()), std::back_inserter(rooms));
    plan.placement.push_back(
        {.shard = shard.address,
         .address = description->advertise_address.empty() ? shard.address : description->advertise_address,
         .layers = {}});
  }
  const Placement placement = PlaceLayers(EstimateLayers(spec, methods), rooms);
  if (!placement.feasible) {
    return ReasonedStatus(StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", spec.name, "\": ", placement.reason));
  }
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    plan.placement[rooms[placement.shard_of_layer[layer]].shard].layers.push_back(layer);
  }
  if (spec.exchange == ExchangeMode::kDelegate && spec.delegates.empty()) {
    plan.delegates = DelegateByDevice(placement, rooms, rank_devices);
  }
  logger_.Log(Severity::kInfo, "layers placed", {{"session", spec.name}, {"reason", placement.reason}});
  return plan;
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

absl::Status Coordinator::RemoveFromShards(uint64_t session_id, const std::vector<PlacedLayers>& placement) const {
  absl::Status first;
  for (size_t s = 0; s < placement.size(); ++s) {
    if (placement[s].layers.empty()) continue;
    const absl::Status status = shards_[s].control->Remove(session_id).status();
    // All shards are asked, so that one that fails does not keep the memory of the others reserved.
    if (first.ok() && !status.ok()) {
      first = AddContext(status, absl::StrCat("session_id ", session_id, ", shard ", shards_[s].address));
    }
  }
  return first;
}

absl::StatusOr<bool> Coordinator::CloseSession(absl::string_view name, const SessionCaller& caller) {
  PRECONDOR_RETURN_IF_ERROR(CheckLeads());
  std::shared_ptr<CoordinatorSession> ends;
  {
    SessionLock locked(*this, name, /*create=*/false);
    ends = locked.state();
    if (ends != nullptr && !MayClose(*ends, caller)) return NotTheirs(absl::StrCat("\"", name, "\""));
    if (ends != nullptr) {
      // Written before any shard is told: a removal on a shard cannot be undone.
      const auto closing = [&] { return ClosingRecord{.session_id = ends->id()}; };
      PRECONDOR_RETURN_IF_ERROR(journal_.Write(closing, [&] {
        MutexLock lock(mu_);
        sessions_.Remove(ends->id());
        ending_.Add(ends);
      }));
      locked.SetState(nullptr);
    }
  }
  if (ends != nullptr) {
    PublishCount();
    observer_.OnSessionClosed(name);
    logger_.Log(Severity::kInfo, "session closed", {{"session", name}, {"session_id", ends->id()}});
  } else {
    // An earlier call may have ended the session without an answer from every shard.
    MutexLock lock(mu_);
    ends = ending_.FindByName(name);
    if (ends != nullptr && !MayClose(*ends, caller)) ends = nullptr;
  }
  if (ends == nullptr) return false;
  absl::Status first;
  for (size_t s = 0; s < shards_.size(); ++s) {
    const bool has_layers = !ends->placement().shards()[s].layers.empty();
    // Skips a silent shard that has no layers of the session: Reconcile tells it when it answers.
    if (watch_.IsSilent(s) && !has_layers) continue;
    // All other shards are asked, so that one that fails does not keep the memory of the others reserved.
    absl::Status removed = RemoveEnding(ends->id(), s);
    if (first.ok() && has_layers) first = std::move(removed);
  }
  CloseRemoved();
  PRECONDOR_RETURN_IF_ERROR(first);
  return true;
}

}  // namespace precondor
