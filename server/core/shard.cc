// SPDX-License-Identifier: Apache-2.0
#include "server/core/shard.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/shard_layers.h"
#include "server/core/shard_session.h"

namespace precondor {
namespace {

absl::Status CheckInstall(const SessionInstall& install) {
  if (install.session_id == 0) return absl::InvalidArgumentError("session_id: expected anything but 0");
  if (install.epoch == 0) return absl::InvalidArgumentError("epoch: expected at least 1, got 0");
  PRECONDOR_RETURN_IF_ERROR(ValidateSessionSpec(install.spec));
  for (size_t i = 0; i < install.layers.size(); ++i) {
    const uint32_t layer = install.layers[i];
    if (layer >= install.spec.layers.size() || (i > 0 && layer <= install.layers[i - 1])) {
      return absl::InvalidArgumentError(absl::StrCat("layers[", i, "]: expected ascending places below ",
                                                     install.spec.layers.size(), ", got ", layer));
    }
  }
  for (const Member& member : install.members) {
    if (member.rank >= static_cast<uint32_t>(install.spec.world_size) || member.incarnation == 0) {
      return absl::InvalidArgumentError(absl::StrCat("members: expected ranks below ", install.spec.world_size,
                                                     " and incarnations above 0, got rank ", member.rank,
                                                     " incarnation ", member.incarnation));
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<ShardContext> MakeContext(const ShardOptions& options, std::vector<ShardDevice> devices,
                                          const Clock& clock, Logger& logger, Observer& observer) {
  PRECONDOR_CHECK(!devices.empty());
  PRECONDOR_CHECK(options.group == nullptr || options.group->size() == static_cast<int>(devices.size()));
  std::vector<std::string> names;
  names.reserve(devices.size());
  for (const ShardDevice& device : devices) names.push_back(device.name);
  return std::shared_ptr<ShardContext>(
      new ShardContext{.options = options,
                       .devices = std::move(devices),
                       .clock = clock,
                       .logger = logger,
                       .observer = observer,
                       .costs = {},
                       .memory = MemoryAccount(std::move(names), options.capacity_bytes, observer)});
}

}  // namespace

Shard::Shard(const ShardOptions& options, std::vector<ShardDevice> devices, const Clock& clock, Logger& logger,
             Observer& observer)
    : context_(MakeContext(options, std::move(devices), clock, logger, observer)),
      gate_([journal = options.journal](uint64_t token) {
        return journal == nullptr ? absl::OkStatus() : journal->RememberLeader(token);
      }) {
  for (const ShardDevice& device : context_->devices) observer.OnDevice(device.name, true);
}

Shard::Shard(const ShardOptions& options, Backend& backend, Executor& executor, const Clock& clock, Logger& logger,
             Observer& observer)
    : Shard(options, {ShardDevice{.name = std::string(backend.name()), .backend = backend, .executor = executor}},
            clock, logger, observer) {}

Shard::~Shard() {
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) {
    session->Close(absl::AbortedError("the shard is shutting down"));
  }
}

// --- control --------------------------------------------------------------------------------------------------------

absl::StatusOr<FencingGate::Pass> Shard::Admit(uint64_t token) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  return gate_.Enter(token);
}

absl::StatusOr<ShardDescription> Shard::Describe() {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  ShardDescription description{.advertise_address = context_->options.advertise_address,
                               .capacity_bytes = 0,
                               .reserved_bytes = 0,
                               .devices = devices(),
                               .costs = context_->costs.Snapshot(),
                               .sessions = {}};
  for (const DeviceUse& device : description.devices) {
    description.capacity_bytes += device.capacity_bytes;
    description.reserved_bytes += device.reserved_bytes;
  }
  for (const ShardSessionSummary& session : ListSessions()) {
    description.sessions.push_back({.session_id = session.session_id,
                                    .name = session.spec.name,
                                    .epoch = session.epoch,
                                    .reserved_bytes = session.reserved_bytes,
                                    .factors_released = session.factors_released,
                                    .joined = session.joined});
  }
  return description;
}

absl::StatusOr<ShardDescription> Shard::Probe(const ShardLease& lease) {
  PRECONDOR_ASSIGN_OR_RETURN(ShardDescription description, Describe());
  description.shard_time = context_->clock.Now();
  context_->lease.Grant(lease, description.shard_time);
  return description;
}

absl::StatusOr<int64_t> Shard::Install(const SessionInstall& install) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  PRECONDOR_ASSIGN_OR_RETURN(const bool returned, BringBack(install.session_id));
  const absl::StatusOr<int64_t> bytes = InstallRecorded(install, true);
  if (returned) Release(install.session_id, /*gone=*/true);
  PRECONDOR_RETURN_IF_ERROR(bytes.status());
  // A process that hears of it may rely on finding the session here, even after a power failure: the records that
  // follow are worth nothing without it.
  if (context_->options.journal != nullptr) context_->options.journal->Sync();
  if (const auto session = Find(install.session_id); session.ok()) {
    (*session)->context().installed_ns = absl::ToUnixNanos(context_->clock.Now());
  }
  return *bytes;
}

absl::StatusOr<int64_t> Shard::InstallRecorded(const SessionInstall& install, bool record) {
  PRECONDOR_RETURN_IF_ERROR(CheckInstall(install));
  if (absl::StatusOr<std::shared_ptr<ShardSession>> session = FindAny(install.session_id); session.ok()) {
    PRECONDOR_ASSIGN_OR_RETURN(const bool other_layers, (*session)->ChangesLayers(install));
    if (other_layers) return ChangeLayers(*session, install, record);
    // Before the layers' records of the new epoch; a replay refuses it for the reason that Reinstall has.
    // One that comes late says less than those before it did.
    if (record && (*session)->IsNews(install)) Record(InstallRecord{install});
    PRECONDOR_RETURN_IF_ERROR((*session)->Reinstall(install));
    return (*session)->factors().reserved_bytes();
  }
  return InstallNew(install, record);
}

absl::StatusOr<std::optional<uint64_t>> Shard::Fence(const EpochFence& fence) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  PRECONDOR_ASSIGN_OR_RETURN(const bool returned, BringBack(fence.session_id));
  const auto end = absl::MakeCleanup([&] {
    if (returned) Release(fence.session_id, /*gone=*/true);
  });
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, FindAny(fence.session_id));
  return session->Fence(fence);
}

void Shard::Record(const ShardRecord& record) {
  if (context_->options.journal != nullptr) context_->options.journal->Append(record);
}

absl::StatusOr<int64_t> Shard::InstallNew(const SessionInstall& install, bool record) {
  PRECONDOR_RETURN_IF_ERROR(CheckNotAside(install.session_id));
  PRECONDOR_ASSIGN_OR_RETURN(MethodSet methods, MethodSet::Make(install.spec, context_->options.make_method));
  // In a replay there are none: who has gone says so in a record of its own.
  if (record) PRECONDOR_RETURN_IF_ERROR(ReplaceSameNameSession(install));
  PRECONDOR_RETURN_IF_ERROR(CheckNotDraining(install.spec.name));
  PRECONDOR_ASSIGN_OR_RETURN(const LayerRoom room,
                             MakeRoom(install, methods, nullptr, !install.factors_released, context_->memory.none()));
  std::shared_ptr<SessionContext> session_context(
      new SessionContext{.shard = context_,
                         .session_id = install.session_id,
                         .state_generation = GenerationOfNew(install.session_id),
                         .spec = install.spec,
                         .methods = std::move(methods),
                         .devices = MakeSessionDevices(*context_),
                         .device_of_layer = DeviceOfLayer(install.spec.layers.size())});
  PRECONDOR_CHECK(GiveDevices(*session_context, room.layers));
  absl::StatusOr<std::shared_ptr<ShardSession>> session =
      ShardSession::Create(std::move(session_context), install, room.sizes);
  if (!session.ok()) {
    context_->memory.Release(room.bytes);
    return session.status();
  }
  if (record) Record(InstallRecord{install});
  context_->observer.OnSessionInstalled(install.spec.name);
  bool inserted = false;
  {
    MutexLock lock(mu_);
    const auto aside = aside_.find(install.session_id);
    const bool gone = aside != aside_.end() && aside->second.state != Aside::State::kReturning;
    inserted = !gone && sessions_.try_emplace(install.session_id, *session).second;
    context_->observer.OnShardSessions(static_cast<int64_t>(sessions_.size()));
  }
  if (!inserted) {
    // The same Install came twice at once and the other one was faster; it may be in quarantine again by now.
    context_->observer.OnSessionRemoved(install.spec.name);
    context_->memory.Release((*session)->factors().Close());
    return InstallRecorded(install, record);
  }
  NoteLayers(install, room, "session installed");
  return room.bytes.total();
}

absl::Status Shard::ReplaceSameNameSession(const SessionInstall& install) {
  uint64_t older = 0;
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) {
    if (session->spec().name != install.spec.name || session->id() == install.session_id) continue;
    if (session->id() > install.session_id) {
      return ReasonedStatus(absl::StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch,
                            absl::StrCat("session \"", install.spec.name, "\": session_id ", session->id(),
                                         " has replaced ", install.session_id));
    }
    older = session->id();
  }
  if (older == 0) return absl::OkStatus();
  // Names are unique on a coordinator: it has forgotten the older one, and nothing else frees it.
  context_->logger.Log(Severity::kWarning, "session replaced by a later one of the same name",
                       {{"session", install.spec.name}, {"session_id", older}});
  return PutAside(older, /*whole=*/false).status();
}

uint64_t Shard::GenerationOfNew(uint64_t session_id) {
  MutexLock lock(mu_);
  if (!removed_.contains(session_id)) return 0;
  return state_generation_.fetch_add(1, std::memory_order_acq_rel) + 1;
}

absl::Status Shard::CheckNotDraining(absl::string_view name) const {
  MutexLock lock(mu_);
  if (!draining_) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kDraining,
                        absl::StrCat("session \"", name, "\": the shard is draining"));
}

absl::Status Shard::HoldFactors(const FactorHold& hold) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, Find(hold.session_id));
  if (hold.hold) return session->factors().Hold(hold.version);
  session->factors().Release(hold.version);
  return absl::OkStatus();
}

absl::StatusOr<bool> Shard::Remove(uint64_t session_id) {
  PRECONDOR_RETURN_IF_ERROR(CheckServing());
  PRECONDOR_ASSIGN_OR_RETURN(const bool existed, RemoveRecorded(session_id, true));
  PRECONDOR_ASSIGN_OR_RETURN(const bool aside, RemoveAside(session_id));
  return existed || aside;
}

absl::StatusOr<std::shared_ptr<ShardSession>> Shard::TakeOut(uint64_t session_id, bool aside, bool record) {
  std::shared_ptr<ShardSession> session;
  uint64_t last_step = 0;
  {
    MutexLock lock(mu_);
    auto found = sessions_.find(session_id);
    if (found == sessions_.end()) return nullptr;
    if (record && aside_.contains(session_id)) return NotYet(session_id);
    session = std::move(found->second);
    sessions_.erase(found);
    removed_.insert(session_id);
    last_step = session->context().last_step.load();
    if (aside) {
      aside_[session_id] = {.state = Aside::State::kParting, .last_step = last_step, .work = session->shared_context()};
      context_->observer.OnQuarantinedSessions(static_cast<int64_t>(aside_.size()));
    }
    context_->observer.OnShardSessions(static_cast<int64_t>(sessions_.size()));
  }
  const std::string& name = session->spec().name;
  session->Close(aside ? ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                                        absl::StrCat("session \"", name, "\": no coordinator knows it"))
                       : ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kUnknownSession,
                                        absl::StrCat("session \"", name, "\" has been closed")));
  // Before another session has the memory: a restart makes room in the same order.
  if (record && aside) {
    Record(QuarantineRecord{.session_id = session_id, .last_step = last_step});
  } else if (record) {
    Record(RemoveRecord{session_id});
  }
  context_->memory.Release(session->factors().Close());
  context_->observer.OnSessionRemoved(name);
  return session;
}

absl::StatusOr<bool> Shard::RemoveRecorded(uint64_t session_id, bool record) {
  PRECONDOR_ASSIGN_OR_RETURN(const std::shared_ptr<ShardSession> session, TakeOut(session_id, /*aside=*/false, record));
  if (session == nullptr) return false;
  context_->logger.Log(Severity::kInfo, "session removed",
                       {{"session", session->spec().name}, {"session_id", session_id}});
  return true;
}

void Shard::BeginDrain() {
  MutexLock lock(mu_);
  draining_ = true;
}

// --- sessions --------------------------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<ShardSession>> Shard::Find(uint64_t session_id) const {
  {
    MutexLock lock(mu_);
    if (aside_.contains(session_id)) {
      return ReasonedStatus(absl::StatusCode::kUnavailable, ErrorReason::kNotActive,
                            absl::StrCat("session_id ", session_id, ": in quarantine, since no coordinator knows it"));
    }
  }
  return FindAny(session_id);
}

absl::StatusOr<std::shared_ptr<ShardSession>> Shard::FindAny(uint64_t session_id) const {
  MutexLock lock(mu_);
  auto found = sessions_.find(session_id);
  if (found != sessions_.end()) return found->second;
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session_id ", session_id, ": no such session on this shard"));
}

// --- upkeep ----------------------------------------------------------------------------------------------------------

void Shard::SealOverdue() {
  if (context_->options.statistics_deadline == absl::InfiniteDuration()) return;
  const absl::Time now = context_->clock.Now();
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) session->SealOverdue(now);
}

void Shard::FreeReleasedFactors() {
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) session->factors().FreeReleased();
}

size_t Shard::CountLostDevices() {
  size_t count = 0;
  for (const DeviceUse& device : devices()) {
    if (device.fault.empty()) continue;
    ++count;
    {
      MutexLock lock(mu_);
      if (!lost_devices_.insert(device.name).second) continue;
    }
    context_->observer.OnDevice(device.name, false);
    context_->logger.Log(Severity::kError, "device lost", {{"device", device.name}, {"reason", device.fault}});
  }
  return count;
}

void Shard::ReportStragglers() {
  if (context_->options.slow_worker == absl::InfiniteDuration()) return;
  const absl::Time since = context_->clock.Now() - context_->options.slow_worker;
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) session->ReportStragglers(since);
}

// --- inspection ------------------------------------------------------------------------------------------------------

std::vector<std::shared_ptr<ShardSession>> Shard::AllSessions() const {
  std::vector<std::shared_ptr<ShardSession>> sessions;
  {
    MutexLock lock(mu_);
    for (const auto& [id, session] : sessions_) {
      if (!aside_.contains(id)) sessions.push_back(session);
    }
  }
  std::sort(sessions.begin(), sessions.end(), [](const auto& x, const auto& y) { return x->id() < y->id(); });
  return sessions;
}

std::vector<ShardSessionSummary> Shard::ListSessions() const {
  std::vector<ShardSessionSummary> summaries;
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) summaries.push_back(session->summary());
  return summaries;
}

absl::StatusOr<std::vector<LayerStats>> Shard::GetLayerStats(absl::string_view session_name) const {
  for (const std::shared_ptr<ShardSession>& session : AllSessions()) {
    if (session->spec().name == session_name) return session->layer_stats();
  }
  return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                        absl::StrCat("session \"", session_name, "\": not on this shard"));
}

int64_t Shard::reserved_bytes() const { return context_->memory.reserved().total(); }

std::vector<DeviceUse> Shard::devices() const {
  const DeviceBytes reserved = context_->memory.reserved();
  std::vector<DeviceUse> uses;
  for (size_t i = 0; i < reserved.of.size(); ++i) {
    uses.push_back({.name = context_->devices[i].name,
                    .capacity_bytes = context_->memory.capacity(),
                    .reserved_bytes = reserved.of[i],
                    .fault = std::string(context_->devices[i].backend.fault().message())});
  }
  return uses;
}

std::shared_ptr<MemoryAccount> Shard::memory() const { return {context_, &context_->memory}; }

int64_t Shard::in_flight() const { return context_->in_flight.load(std::memory_order_relaxed); }

}  // namespace precondor
