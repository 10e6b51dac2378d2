// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin_service.h"

#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/bounded_handler.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {

AdminService::AdminService(AdminSubject subject, ControlRunner& runner)
    : subject_(std::move(subject)), runner_(runner), start_(runner.clock().Now()) {
  const auto bound = [&](absl::string_view name, auto method) {
    MarkMethodCallback(MethodIndex(name), BoundedHandler(runner, name, WithinBudget(runner, name), this, method));
  };
  bound("AdminService/GetServerInfo", &AdminService::GetServerInfo);
  bound("AdminService/ListSessions", &AdminService::ListSessions);
  bound("AdminService/GetLayerStats", &AdminService::GetLayerStats);
  bound("AdminService/GetMode", &AdminService::GetMode);
  bound("AdminService/SetMode", &AdminService::SetMode);
  bound("AdminService/Drain", &AdminService::Drain);
}

grpc::ServerUnaryReactor* AdminService::GetServerInfo(grpc::CallbackServerContext* context,
                                                      const v1::GetServerInfoRequest*,
                                                      v1::GetServerInfoResponse* response) {
  return runner_.RunNow(context, "AdminService/GetServerInfo", [this, response] {
    response->set_version(subject_.version);
    response->set_role(subject_.role);
    response->set_uptime_seconds(absl::ToDoubleSeconds(runner_.clock().Now() - start_));
    response->set_draining(subject_.draining());
    if (subject_.shard != nullptr) {
      response->set_backend(subject_.backend);
      int64_t capacity = 0, reserved = 0;
      for (const DeviceUse& device : subject_.shard->devices()) {
        EncodeDevice(device, *response->add_devices());
        capacity += device.capacity_bytes;
        reserved += device.reserved_bytes;
      }
      response->set_capacity_bytes(static_cast<uint64_t>(capacity));
      response->set_reserved_bytes(static_cast<uint64_t>(reserved));
      response->set_sessions(static_cast<uint32_t>(subject_.shard->ListSessions().size()));
    }
    if (subject_.coordinator != nullptr) {
      response->set_sessions(static_cast<uint32_t>(subject_.coordinator->ListSessions().size()));
      for (const std::string& address : subject_.coordinator->ShardAddresses()) response->add_shards(address);
    }
    return absl::OkStatus();
  });
}

absl::Status AdminService::Summarize(v1::ListSessionsResponse& response) const {
  std::map<std::string, v1::SessionSummary> summaries;  // by name
  if (subject_.shard != nullptr) {
    for (const ShardSessionSummary& session : subject_.shard->ListSessions()) {
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
  if (subject_.coordinator != nullptr) {
    for (const CoordinatorSessionSummary& session : subject_.coordinator->ListSessions()) {
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

grpc::ServerUnaryReactor* AdminService::ListSessions(grpc::CallbackServerContext* context,
                                                     const v1::ListSessionsRequest*,
                                                     v1::ListSessionsResponse* response) {
  return runner_.RunNow(context, "AdminService/ListSessions", [this, response] { return Summarize(*response); });
}

grpc::ServerUnaryReactor* AdminService::GetLayerStats(grpc::CallbackServerContext* context,
                                                      const v1::GetLayerStatsRequest* request,
                                                      v1::GetLayerStatsResponse* response) {
  return runner_.RunNow(context, "AdminService/GetLayerStats", [this, request, response]() -> absl::Status {
    if (subject_.shard == nullptr) {
      return ReasonedStatus(absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
                            absl::StrCat("session \"", request->session().substr(0, 128),
                                         "\": a coordinator owns no layers; ask its shards"));
    }
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<LayerStats> layers, subject_.shard->GetLayerStats(request->session()));
    for (const LayerStats& stats : layers) *response->add_layers() = EncodeLayerStats(stats);
    return absl::OkStatus();
  });
}

absl::Status AdminService::CheckCoordinator(const std::string& session) const {
  if (subject_.coordinator != nullptr) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kNotFound, ErrorReason::kUnknownSession,
      absl::StrCat("session \"", session.substr(0, 128), "\": a shard decides nothing; ask the coordinator"));
}

grpc::ServerUnaryReactor* AdminService::GetMode(grpc::CallbackServerContext* context, const v1::GetModeRequest* request,
                                                v1::GetModeResponse* response) {
  return runner_.RunNow(context, "AdminService/GetMode", [this, request, response]() -> absl::Status {
    PRECONDOR_RETURN_IF_ERROR(CheckCoordinator(request->session()));
    PRECONDOR_ASSIGN_OR_RETURN(const CoordinatorSessionSummary session,
                               subject_.coordinator->GetSession(request->session()));
    *response->mutable_status() = EncodeModeStatus(session);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SetMode(grpc::CallbackServerContext* context, const v1::SetModeRequest* request,
                                                v1::SetModeResponse* response) {
  return runner_.Run(context, "AdminService/SetMode", [this, request, response]() -> absl::Status {
    PRECONDOR_RETURN_IF_ERROR(CheckCoordinator(request->session()));
    std::optional<Mode> mode;
    if (request->mode() != v1::MODE_UNSPECIFIED) {
      PRECONDOR_ASSIGN_OR_RETURN(mode, wire::DecodeMode(request->mode(), "mode"));
    }
    PRECONDOR_ASSIGN_OR_RETURN(const CoordinatorSessionSummary session,
                               subject_.coordinator->SetMode(request->session(), mode));
    *response->mutable_status() = EncodeModeStatus(session);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                              v1::DrainResponse* response) {
  return runner_.RunNow(context, "AdminService/Drain", [this, request, response] {
    if (subject_.shard != nullptr) response->set_in_flight(static_cast<uint64_t>(subject_.shard->in_flight()));
    subject_.begin_drain(absl::Milliseconds(request->deadline_ms()));
    return absl::OkStatus();
  });
}

}  // namespace precondor::rpc
