// SPDX-License-Identifier: Apache-2.0
// How sessions are opened, placed on shards, and closed.
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/session_memory.h"
#include "kernels/base/status_macros.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/coordinator/coordinator_context.h"
#include "server/core/coordinator/coordinator_session.h"
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
  return caller.is_operator || session.access.Admits(caller);
}

bool IsSilent(const CoordinatorContext& c, size_t shard) {
  MutexLock lock(c.mu);
  return c.watch.IsSilent(shard);
}

// Checks that there is room for one more session. Returns RESOURCE_EXHAUSTED (CAPACITY), with the numbers, if a tenant
// or the coordinator's tables have none.
absl::Status CheckRoom(const CoordinatorOptions& options, const CoordinatorState& state, absl::string_view name,
                       const TenantSession& session) {
  if (options.tenant_limits.any()) {
    std::vector<TenantSession> others;
    for (const auto& [id, other] : state.counted) others.push_back(other);
    PRECONDOR_RETURN_IF_ERROR(CheckTenantLimits(options.tenant_limits, name, session, others));
  }
  int64_t held = 0;
  for (const auto& [id, other] : state.counted) held += other.table_bytes;
  if (options.table_bytes == 0 || session.table_bytes <= options.table_bytes - held) return absl::OkStatus();
  return ReasonedStatus(StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                        absl::StrCat("session \"", name, "\": the coordinator keeps ", options.table_bytes,
                                     " bytes of descriptions and ranks (memory_limit), has ", held, " in ",
                                     state.open.size(), " sessions, and needs ", session.table_bytes, " more"));
}

// Describes the shard. Clears it first of sessions that the coordinator does not know.
absl::StatusOr<ShardDescription> DescribeCleared(CoordinatorContext& c, size_t shard) {
  PRECONDOR_ASSIGN_OR_RETURN(ShardDescription observed, c.shards[shard].control->Describe());
  std::vector<CoordinatorAction> actions;
  {
    MutexLock lock(c.mu);
    actions = ClearUnknown(c.state, shard, observed);
  }
  bool cleared = false;
  for (const CoordinatorAction& action : actions) cleared = CarryOut(c, action).ok() || cleared;
  if (!cleared) return observed;
  return c.shards[shard].control->Describe();  // its device has other free bytes now
}

struct SessionPlan {
  std::vector<PlacedLayers> placement;  // one entry for each shard
  std::vector<uint32_t> delegates;      // SessionSpec::delegates
};

// Places the session's layers and, unless the spec has delegates, chooses these by `rank_devices`.
absl::StatusOr<SessionPlan> MakePlan(CoordinatorContext& c, const SessionSpec& spec, const MethodSet& methods,
                                     absl::Span<const std::string> rank_devices) {
  for (const auto& [method, warning] : Warnings(spec, methods)) {
    c.logger.Log(Severity::kWarning, warning, {{"session", spec.name}, {"method", method->name()}});
  }
  std::vector<PlacementShard> rooms;
  SessionPlan plan{.placement = {}, .delegates = spec.delegates};
  for (size_t s = 0; s < c.shards.size(); ++s) {
    const std::string& name = c.shards[s].address;
    const absl::StatusOr<ShardDescription> description = DescribeCleared(c, s);
    if (!description.ok()) {
      return AddContext(description.status(), absl::StrCat("session \"", spec.name, "\", shard ", name));
    }
    const DeviceUse& device = description->device;
    rooms.push_back({.free_bytes = device.capacity_bytes - device.reserved_bytes, .ring_device = device.ring_device});
    const std::string& advertised = description->advertise_address;
    plan.placement.push_back({.shard = name, .address = advertised.empty() ? name : advertised, .layers = {}});
  }
  const Placement placement = PlaceLayers(EstimateLayers(spec, methods), rooms);
  if (!placement.feasible) {
    return ReasonedStatus(StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("session \"", spec.name, "\": ", placement.reason));
  }
  for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
    plan.placement[placement.shard_of_layer[layer]].layers.push_back(layer);
  }
  if (spec.exchange == ExchangeMode::kDelegate && spec.delegates.empty()) {
    plan.delegates = DelegateByDevice(placement, rooms, rank_devices);
  }
  c.logger.Log(Severity::kInfo, "layers placed", {{"session", spec.name}, {"reason", placement.reason}});
  return plan;
}

// Removes a session that failed to open from all shards that may have it.
void GiveUp(CoordinatorContext& c, const CoordinatorSession& session) {
  {
    MutexLock lock(c.mu);
    c.state.Abandon(session.id);
  }
  absl::Status first;
  for (size_t s = 0; s < c.shards.size(); ++s) {
    if (session.placement[s].layers.empty()) continue;
    const absl::Status status = c.shards[s].control->Remove(session.id).status();
    // All shards are asked, so that one that fails does not keep the memory of the others reserved.
    if (first.ok()) {
      first = AddContext(status, absl::StrCat("session_id ", session.id, ", shard ", c.shards[s].address));
    }
  }
  if (first.ok()) return;
  c.logger.Log(
      Severity::kError, "cannot remove a session that failed to open",
      {{"session", session.spec.name}, {"session_id", session.id}, {"reason", absl::string_view(first.message())}});
}

// Precondition: the caller holds the SessionLock of the name, which no session has.
absl::StatusOr<std::shared_ptr<CoordinatorSession>> CreateSession(CoordinatorContext& c, SessionSpec spec,
                                                                  const MethodSet& methods, SessionAccess access,
                                                                  absl::Span<const std::string> rank_devices) {
  const TenantSession counted{.tenants = access.tenants,
                              .bytes = c.options.tenant_limits.bytes == 0 ? 0 : SessionBytes(spec, methods),
                              .table_bytes = SessionTableBytes(spec)};
  uint64_t id = 0;
  {
    MutexLock lock(c.mu);
    PRECONDOR_RETURN_IF_ERROR(CheckRoom(c.options, c.state, spec.name, counted));
    id = c.state.BeginOpening(counted, c.clock.Wall());
  }
  absl::StatusOr<SessionPlan> plan = MakePlan(c, spec, methods, rank_devices);
  if (!plan.ok()) {
    MutexLock lock(c.mu);
    c.state.counted.erase(id);
    return plan.status();
  }
  spec.delegates = std::move(plan->delegates);
  auto session =
      std::make_shared<CoordinatorSession>(SessionRecord{.session_id = id,
                                                         .spec = spec,
                                                         .placement = std::move(plan->placement),
                                                         .membership = SessionMembers::First(spec),
                                                         .lease = StepLeases::First(spec, c.options.lease_steps),
                                                         .access = std::move(access)},
                                           c.options.lease_steps);
  absl::Status status = InstallOnShards(c, MakeInstalls(*session));
  if (status.ok()) {
    status = c.journal.Write(MakeRecord(*session), [&] {
      MutexLock lock(c.mu);
      c.state.Open(session);
    });
  }
  if (!status.ok()) {
    GiveUp(c, *session);
    return status;
  }
  c.logger.Log(Severity::kInfo, "session opened",
               {{"session", spec.name},
                {"session_id", id},
                {"layers", static_cast<uint64_t>(spec.layers.size())},
                {"shards", static_cast<uint64_t>(absl::c_count_if(
                               session->placement, [](const PlacedLayers& placed) { return !placed.layers.empty(); }))},
                {"world_size", spec.world_size}});
  return session;
}

}  // namespace

std::string WhyNoFirstOrder(const SessionSpec& spec, const MethodSet& methods) {
  for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
    const Method& method = methods.of(static_cast<int64_t>(layer));
    if (!method.traits().whole_updates) continue;
    return absl::StrCat(
        "layer \"", spec.layers[layer].name, "\" has the method ", method.name(),
        ", whose answers are whole updates; in first order it would get its averaged gradient, which is "
        "plain gradient descent at the rate of those updates");
  }
  return "";
}

absl::StatusOr<OpenResult> Coordinator::OpenSession(const SessionSpec& spec, const SessionCaller& caller,
                                                    absl::Span<const std::string> rank_devices) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(spec));
  PRECONDOR_RETURN_IF_ERROR(CheckRankDevices(spec, rank_devices));
  PRECONDOR_ASSIGN_OR_RETURN(const MethodSet methods, MethodSet::Make(spec, c.options.make_method));
  if (spec.fallback.policy != FallbackPolicy::kNever) {
    const std::string why = WhyNoFirstOrder(spec, methods);
    if (!why.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("session \"", spec.name, "\": fallback: expected policy ",
                                                     FallbackPolicyName(FallbackPolicy::kNever), ", got ",
                                                     FallbackPolicyName(spec.fallback.policy), ": ", why));
    }
  }
  {
    MutexLock lock(c.mu);
    if (c.state.draining) {
      return ReasonedStatus(StatusCode::kUnavailable, ErrorReason::kDraining,
                            absl::StrCat("session \"", spec.name, "\": the server is draining"));
    }
  }
  SessionSpec filled = FillDefaults(spec);
  const SessionLock locked(c, spec.name, /*opens=*/true);
  std::shared_ptr<CoordinatorSession> session = locked.session();
  const bool created = session == nullptr;
  if (created) {
    PRECONDOR_ASSIGN_OR_RETURN(session, CreateSession(c, filled, methods, SessionAccess::Make(caller), rank_devices));
    c.observer.OnSessionOpened(filled.name);
    c.observer.OnEpoch(filled.name, session->members().epoch(), 0, filled.world_size);
    c.PublishCount();
  } else {
    // Before the specs are compared: the difference would reveal another tenant's spec.
    if (!session->access.IsForTenantOf(caller)) return NotTheirs(absl::StrCat("\"", spec.name, "\""));
    if (filled.delegates.empty()) filled.delegates = session->spec.delegates;  // the coordinator's choice
    if (const std::string difference = DescribeDifference(session->spec, filled); !difference.empty()) {
      return ReasonedStatus(StatusCode::kFailedPrecondition, ErrorReason::kSpecMismatch,
                            absl::StrCat("session \"", spec.name, "\" exists with another description: ", difference));
    }
  }
  return OpenResult{.session_id = session->id,
                    .created = created,
                    .unused = session->snapshots().IsUnused(session->members()),
                    .spec = session->spec,
                    .secret = session->access.secret};
}

absl::StatusOr<bool> Coordinator::CloseSession(absl::string_view name, const SessionCaller& caller) {
  CoordinatorContext& c = *context_;
  PRECONDOR_RETURN_IF_ERROR(c.CheckLeads());
  std::shared_ptr<CoordinatorSession> ends;
  {
    const SessionLock locked(c, name);
    ends = locked.session();
    if (ends != nullptr && !MayClose(*ends, caller)) return NotTheirs(absl::StrCat("\"", name, "\""));
    if (ends != nullptr) {
      // Written before any shard is told: a removal on a shard cannot be undone.
      PRECONDOR_RETURN_IF_ERROR(c.journal.Write(ClosingRecord{.session_id = ends->id}, [&] {
        MutexLock lock(c.mu);
        c.state.BeginEnding(ends->id, c.shards.size());
      }));
    }
  }
  if (ends != nullptr) {
    c.PublishCount();
    c.observer.OnSessionClosed(name);
    c.logger.Log(Severity::kInfo, "session closed", {{"session", name}, {"session_id", ends->id}});
  } else {
    // An earlier call may have ended the session without an answer from every shard.
    MutexLock lock(c.mu);
    for (const auto& [id, one] : c.state.ending) {
      if (one.session->spec.name == name) ends = one.session;
    }
    if (ends != nullptr && !MayClose(*ends, caller)) ends = nullptr;
  }
  if (ends == nullptr) return false;
  absl::Status first;
  for (size_t s = 0; s < c.shards.size(); ++s) {
    const bool has_layers = !ends->placement[s].layers.empty();
    // Skips a silent shard that has no layers of the session: Reconcile tells it when it answers.
    if (!has_layers && IsSilent(c, s)) continue;
    // All other shards are asked, so that one that fails does not keep the memory of the others reserved.
    absl::Status removed = RemoveEnding(c, ends->id, s);
    if (first.ok() && has_layers) first = std::move(removed);
  }
  std::vector<uint64_t> removed;
  {
    MutexLock lock(c.mu);
    removed = c.state.RemovedEverywhere();
  }
  for (const uint64_t id : removed) WriteClose(c, id);
  PRECONDOR_RETURN_IF_ERROR(first);
  return true;
}

}  // namespace precondor
