// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/session_service.h"

#include <string>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"

namespace precondor::rpc {
namespace {

// The keys of calls that run one after another.
std::string NameKey(absl::string_view name) { return absl::StrCat("name ", name); }
std::string LeaveKey(uint64_t session_id) { return absl::StrCat("leave ", session_id); }

}  // namespace

grpc::ServerUnaryReactor* SessionService::OpenSession(grpc::CallbackServerContext* context,
                                                      const v1::OpenSessionRequest* request,
                                                      v1::OpenSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SessionService/OpenSession", NameKey(request->spec().name()),
      [this, request, response]() -> absl::Status {
        PRECONDOR_ASSIGN_OR_RETURN(const SessionSpec spec, wire::DecodeSessionSpec(request->spec()));
        PRECONDOR_ASSIGN_OR_RETURN(const OpenResult opened, coordinator_.OpenSession(spec));
        PRECONDOR_ASSIGN_OR_RETURN(*response->mutable_spec(), wire::EncodeSessionSpec(opened.spec));
        response->set_session_id(opened.session_id);
        response->set_created(opened.created);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* SessionService::JoinSession(grpc::CallbackServerContext* context,
                                                      const v1::JoinSessionRequest* request,
                                                      v1::JoinSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SessionService/JoinSession", NameKey(request->name()), [this, request, response]() -> absl::Status {
        PRECONDOR_ASSIGN_OR_RETURN(
            const JoinResult joined,
            coordinator_.JoinSession(request->name(), request->rank(), request->incarnation(), request->first_step()));
        PRECONDOR_ASSIGN_OR_RETURN(*response->mutable_spec(), wire::EncodeSessionSpec(joined.spec));
        response->set_session_id(joined.session_id);
        response->set_epoch(joined.epoch);
        response->set_active(joined.active);
        *response->mutable_shard_map() = EncodeShardMap(joined.epoch, joined.shard_map);
        *response->mutable_directive() = EncodeDirective(joined.directive);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* SessionService::ReportStep(grpc::CallbackServerContext* context,
                                                     const v1::ReportStepRequest* request,
                                                     v1::ReportStepResponse* response) {
  // One report of a session at a time waits for the journal; the others do not wait for it.
  return runner_.Run(context, "SessionService/ReportStep", [this, request, response]() -> absl::Status {
    StepReport report;
    report.session_id = request->session_id();
    report.epoch = request->epoch();
    report.rank = request->rank();
    report.incarnation = request->incarnation();
    report.step = request->step();
    report.loss = request->loss();
    report.samples = request->samples();
    report.finite = request->finite();
    report.learning_rate = request->learning_rate();
    PRECONDOR_ASSIGN_OR_RETURN(const Directive directive, coordinator_.ReportStep(report));
    *response->mutable_directive() = EncodeDirective(directive);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* SessionService::LeaveSession(grpc::CallbackServerContext* context,
                                                       const v1::LeaveSessionRequest* request,
                                                       v1::LeaveSessionResponse*) {
  return runner_.RunInOrder(context, "SessionService/LeaveSession", LeaveKey(request->session_id()), [this, request] {
    return coordinator_.LeaveSession(request->session_id(), request->rank(), request->incarnation());
  });
}

grpc::ServerUnaryReactor* SessionService::CloseSession(grpc::CallbackServerContext* context,
                                                       const v1::CloseSessionRequest* request,
                                                       v1::CloseSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SessionService/CloseSession", NameKey(request->name()), [this, request, response]() -> absl::Status {
        PRECONDOR_ASSIGN_OR_RETURN(const bool existed, coordinator_.CloseSession(request->name()));
        response->set_existed(existed);
        return absl::OkStatus();
      });
}

}  // namespace precondor::rpc
