// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"
#include "server/rpc/services.h"

namespace precondor::rpc {

namespace {

absl::Status GetServerInfo(const v1::GetServerInfoRequest&, v1::GetServerInfoResponse& response,
                           const AdminSubject& subject) {
  response.set_version(subject.version);
  response.set_role(subject.role);
  response.set_uptime_seconds(absl::ToDoubleSeconds(subject.uptime()));
  response.set_draining(subject.draining());
  if (subject.shard != nullptr) {
    response.set_backend(subject.backend);
    EncodeDevice(subject.shard->device(), *response.add_devices());
    response.set_capacity_bytes(response.devices(0).capacity_bytes());
    response.set_reserved_bytes(response.devices(0).reserved_bytes());
    response.set_sessions(static_cast<uint32_t>(subject.shard->ListSessions().size()));
  }
  if (subject.coordinator != nullptr) {
    response.set_sessions(static_cast<uint32_t>(subject.coordinator->ListSessions().size()));
    for (const std::string& address : subject.coordinator->ShardAddresses()) response.add_shards(address);
  }
  return absl::OkStatus();
}

// Merges the sessions of the shard and of the coordinator by name.
absl::Status ListSessions(const v1::ListSessionsRequest&, v1::ListSessionsResponse& response,
                          const AdminSubject& subject) {
  std::map<std::string, v1::SessionSummary> summaries;  // by name
  if (subject.shard != nullptr) {
    for (const ShardSessionSummary& session : subject.shard->ListSessions()) {
      v1::SessionSummary& summary = summaries[session.spec.name];
      PRECONDOR_ASSIGN_OR_RETURN(*summary.mutable_spec(), wire::EncodeSessionSpec(session.spec));
      summary.set_session_id(session.session_id);
      summary.set_epoch(session.epoch);
      summary.set_joined(session.joined);
      summary.set_last_step(session.last_step);
      summary.set_mode(wire::EncodeMode(session.mode));
      summary.set_reserved_bytes(static_cast<uint64_t>(session.reserved_bytes));
    }
  }
  if (subject.coordinator != nullptr) {
    for (const CoordinatorSessionSummary& session : subject.coordinator->ListSessions()) {
      v1::SessionSummary& summary = summaries[session.spec.name];
      PRECONDOR_ASSIGN_OR_RETURN(*summary.mutable_spec(), wire::EncodeSessionSpec(session.spec));
      summary.set_session_id(session.session_id);
      summary.set_epoch(session.epoch);
      summary.set_joined(session.joined);
      summary.set_last_step(session.last_step);
      summary.set_mode(wire::EncodeMode(session.mode));
      summary.set_loss(session.loss);
      *summary.mutable_shard_map() = EncodeShardMap(session.epoch, session.shard_map);
    }
  }
  for (auto& [name, summary] : summaries) *response.add_sessions() = std::move(summary);
  return absl::OkStatus();
}

absl::Status GetLayerStats(const v1::GetLayerStatsRequest& request, v1::GetLayerStatsResponse& response,
                           const AdminSubject& subject) {
  if (subject.shard == nullptr) {
    return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                          absl::StrCat("session \"", request.session().substr(0, 128),
                                       "\": a coordinator owns no layers; ask its shards"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerStats> layers, subject.shard->GetLayerStats(request.session()));
  for (const LayerStats& stats : layers) *response.add_layers() = EncodeLayerStats(stats);
  return absl::OkStatus();
}

// Returns NOT_FOUND (UNKNOWN_SESSION) if this process is not a coordinator.
absl::Status CheckCoordinator(const AdminSubject& subject, const std::string& session) {
  if (subject.coordinator != nullptr) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
      absl::StrCat("session \"", session.substr(0, 128), "\": a shard decides nothing; ask the coordinator"));
}

absl::Status GetMode(const v1::GetModeRequest& request, v1::GetModeResponse& response, const AdminSubject& subject) {
  PRECONDOR_RETURN_IF_ERROR(CheckCoordinator(subject, request.session()));
  PRECONDOR_ASSIGN_OR_RETURN(const CoordinatorSessionSummary session,
                             subject.coordinator->GetSession(request.session()));
  *response.mutable_status() = EncodeModeStatus(session);
  return absl::OkStatus();
}

absl::Status SetMode(const v1::SetModeRequest& request, v1::SetModeResponse& response, const AdminSubject& subject) {
  PRECONDOR_RETURN_IF_ERROR(CheckCoordinator(subject, request.session()));
  std::optional<Mode> mode;
  if (request.mode() != v1::MODE_UNSPECIFIED) {
    PRECONDOR_ASSIGN_OR_RETURN(mode, wire::DecodeMode(request.mode(), "mode"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const CoordinatorSessionSummary session,
                             subject.coordinator->SetMode(request.session(), mode));
  *response.mutable_status() = EncodeModeStatus(session);
  return absl::OkStatus();
}

absl::Status Drain(const v1::DrainRequest& request, v1::DrainResponse& response, const AdminSubject& subject) {
  if (subject.shard != nullptr) response.set_in_flight(static_cast<uint64_t>(subject.shard->in_flight()));
  subject.begin_drain(absl::Milliseconds(request.deadline_ms()));
  return absl::OkStatus();
}

}  // namespace

AdminService::AdminService(AdminSubject subject, ControlRunner& runner)
    : ControlService(runner), subject_(std::move(subject)) {
  ServeNow(GetServerInfo, subject_);
  ServeNow(ListSessions, subject_);
  ServeNow(GetLayerStats, subject_);
  ServeNow(GetMode, subject_);
  Serve(SetMode, subject_);
  ServeNow(Drain, subject_);
}
}  // namespace precondor::rpc
