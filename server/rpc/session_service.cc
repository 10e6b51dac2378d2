// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/session_service.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"
#include "server/trace/operation.h"

namespace precondor::rpc {
namespace {

// Keys for ControlRunner::RunInOrder.
std::string LeaveKey(uint64_t session_id) { return absl::StrCat("leave ", session_id); }

SessionCaller WithSecret(SessionCaller caller, const std::string& secret) {
  caller.secret = secret;
  return caller;
}

}  // namespace

void SessionService::BeginStepSpan(uint64_t session_id) {
  if (runner_.tracer() == nullptr) return;
  MutexLock lock(mu_);
  if (step_began_.size() >= kMostStepSpans) step_began_.clear();
  step_began_[session_id] = runner_.clock().Now();
}

void SessionService::EndStepSpan(const StepReport& report) {
  trace::Tracer* const tracer = runner_.tracer();
  if (tracer == nullptr) return;
  const absl::Time now = runner_.clock().Now();
  absl::Time began = now;
  {
    MutexLock lock(mu_);
    if (const auto found = step_began_.find(report.session_id); found != step_began_.end()) began = found->second;
  }
  BeginStepSpan(report.session_id);
  const TraceContext trace = TraceOfStep(report.session_id, report.step);
  if (!tracer->Keeps(trace)) return;
  trace::Span span{.context = trace, .name = "step", .start = began, .end = now};
  span.attributes = {{"precondor.session_id", absl::StrCat(report.session_id)},
                     {"precondor.step", static_cast<int64_t>(report.step)},
                     {"precondor.loss", report.loss}};
  tracer->Record(std::move(span));
}

grpc::ServerUnaryReactor* SessionService::OpenSession(grpc::CallbackServerContext* context,
                                                      const v1::OpenSessionRequest* request,
                                                      v1::OpenSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SessionService/OpenSession", SessionKey(request->spec().name()),
      [this, context, request, response]() -> absl::Status {
        trace::Operation::Annotate("precondor.session", request->spec().name());
        PRECONDOR_RETURN_IF_ERROR(wire::CheckNoRemovedOption(request->spec()));
        PRECONDOR_ASSIGN_OR_RETURN(const SessionSpec spec, wire::DecodeSessionSpec(request->spec()));
        PRECONDOR_ASSIGN_OR_RETURN(const OpenResult opened,
                                   coordinator_.OpenSession(spec, caller_(*context),
                                                            std::vector<std::string>(request->rank_devices().begin(),
                                                                                     request->rank_devices().end())));
        PRECONDOR_ASSIGN_OR_RETURN(*response->mutable_spec(), wire::EncodeSessionSpec(opened.spec));
        response->set_session_id(opened.session_id);
        response->set_created(opened.created);
        response->set_secret(opened.secret);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* SessionService::JoinSession(grpc::CallbackServerContext* context,
                                                      const v1::JoinSessionRequest* request,
                                                      v1::JoinSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SessionService/JoinSession", SessionKey(request->name()),
      [this, context, request, response]() -> absl::Status {
        trace::Operation::Annotate("precondor.session", request->name());
        trace::Operation::Annotate("precondor.rank", int64_t{request->rank()});
        PRECONDOR_ASSIGN_OR_RETURN(
            const JoinResult joined,
            coordinator_.JoinSession(request->name(), request->rank(), request->incarnation(), request->first_step(),
                                     WithSecret(caller_(*context), request->secret())));
        PRECONDOR_ASSIGN_OR_RETURN(*response->mutable_spec(), wire::EncodeSessionSpec(joined.spec));
        if (request->rank() == 0 && joined.active) BeginStepSpan(joined.session_id);
        response->set_session_id(joined.session_id);
        response->set_epoch(joined.epoch);
        response->set_active(joined.active);
        *response->mutable_missing_ranks() = FirstRanks(joined.missing_ranks);
        response->set_secret(joined.secret);
        *response->mutable_shard_map() = EncodeShardMap(joined.epoch, joined.shard_map);
        *response->mutable_directive() = EncodeDirective(joined.directive);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* SessionService::ReportStep(grpc::CallbackServerContext* context,
                                                     const v1::ReportStepRequest* request,
                                                     v1::ReportStepResponse* response) {
  // Reports need no order: at most one report of a session at a time waits for the journal, and no other waits for it.
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
    trace::Operation::Annotate("precondor.session_id", absl::StrCat(report.session_id));
    trace::Operation::Annotate("precondor.step", static_cast<int64_t>(report.step));
    trace::Operation::Annotate("precondor.rank", int64_t{report.rank});
    PRECONDOR_ASSIGN_OR_RETURN(const Directive directive,
                               coordinator_.ReportStep(report, SessionCaller::Showing(request->secret())));
    if (report.rank == 0) EndStepSpan(report);
    *response->mutable_directive() = EncodeDirective(directive);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* SessionService::LeaveSession(grpc::CallbackServerContext* context,
                                                       const v1::LeaveSessionRequest* request,
                                                       v1::LeaveSessionResponse*) {
  return runner_.RunInOrder(context, "SessionService/LeaveSession", LeaveKey(request->session_id()), [this, request] {
    return coordinator_.LeaveSession(request->session_id(), request->rank(), request->incarnation(),
                                     SessionCaller::Showing(request->secret()));
  });
}

grpc::ServerUnaryReactor* SessionService::CloseSession(grpc::CallbackServerContext* context,
                                                       const v1::CloseSessionRequest* request,
                                                       v1::CloseSessionResponse* response) {
  return runner_.RunInOrder(
      context, "SessionService/CloseSession", SessionKey(request->name()),
      [this, context, request, response]() -> absl::Status {
        trace::Operation::Annotate("precondor.session", request->name());
        PRECONDOR_ASSIGN_OR_RETURN(
            const bool existed,
            coordinator_.CloseSession(request->name(), WithSecret(caller_(*context), request->secret())));
        response->set_existed(existed);
        return absl::OkStatus();
      });
}

}  // namespace precondor::rpc
