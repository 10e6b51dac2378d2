// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "precondor/v1/session.pb.h"
#include "proto/wire/spec_codec.h"
#include "server/rpc/convert.h"
#include "server/rpc/services.h"
#include "server/trace/tracer.h"

namespace precondor::rpc {

void SessionSteps::Begin(uint64_t session_id) { BeginAt(session_id, runner_.clock().Now()); }

void SessionSteps::BeginAt(uint64_t session_id, absl::Time time) {
  if (runner_.tracer() == nullptr) return;
  MutexLock lock(mu_);
  if (began_.size() >= kMostStepSpans) began_.clear();
  began_[session_id] = time;
}

void SessionSteps::End(const StepReport& report) {
  trace::Tracer* const tracer = runner_.tracer();
  if (tracer == nullptr) return;
  const absl::Time end = runner_.clock().Now() - report.ago;
  absl::Time began = end;
  {
    MutexLock lock(mu_);
    if (const auto found = began_.find(report.session_id); found != began_.end()) began = std::min(found->second, end);
  }
  BeginAt(report.session_id, end);
  const TraceContext trace = TraceOfStep(report.session_id, report.step);
  if (!tracer->Keeps(trace)) return;
  trace::Span span{.context = trace, .name = "step", .start = began, .end = end};
  span.attributes = {{"precondor.session_id", absl::StrCat(report.session_id)},
                     {"precondor.step", static_cast<int64_t>(report.step)},
                     {"precondor.loss", report.loss}};
  tracer->Record(std::move(span));
}

namespace {

constexpr double kMostSecondsAgo = 86400;

SessionCaller WithSecret(SessionCaller caller, const std::string& secret) {
  caller.secret = secret;
  return caller;
}

absl::Status OpenSession(const v1::OpenSessionRequest& request, v1::OpenSessionResponse& response,
                         SessionSubject& subject, const grpc::CallbackServerContext& context) {
  trace::Operation::Annotate("precondor.session", request.spec().name());
  PRECONDOR_ASSIGN_OR_RETURN(const SessionSpec spec, wire::DecodeSessionSpec(request.spec()));
  PRECONDOR_ASSIGN_OR_RETURN(const OpenResult opened,
                             subject.coordinator.OpenSession(spec, subject.caller(context),
                                                             std::vector<std::string>(request.rank_devices().begin(),
                                                                                      request.rank_devices().end())));
  PRECONDOR_ASSIGN_OR_RETURN(*response.mutable_spec(), wire::EncodeSessionSpec(opened.spec));
  response.set_session_id(opened.session_id);
  response.set_created(opened.created);
  response.set_unused(opened.unused);
  response.set_secret(opened.secret);
  return absl::OkStatus();
}
std::string OpenKey(const v1::OpenSessionRequest& request) { return SessionKey(request.spec().name()); }

absl::Status JoinSession(const v1::JoinSessionRequest& request, v1::JoinSessionResponse& response,
                         SessionSubject& subject, const grpc::CallbackServerContext& context) {
  trace::Operation::Annotate("precondor.session", request.name());
  trace::Operation::Annotate("precondor.rank", int64_t{request.rank()});
  PRECONDOR_ASSIGN_OR_RETURN(
      const JoinResult joined,
      subject.coordinator.JoinSession(request.name(), request.rank(), request.incarnation(), request.first_step(),
                                      WithSecret(subject.caller(context), request.secret())));
  PRECONDOR_ASSIGN_OR_RETURN(*response.mutable_spec(), wire::EncodeSessionSpec(joined.spec));
  if (request.rank() == 0 && joined.active) subject.steps.Begin(joined.session_id);
  response.set_session_id(joined.session_id);
  response.set_epoch(joined.epoch);
  response.set_active(joined.active);
  *response.mutable_missing_ranks() = FirstRanks(joined.missing_ranks);
  response.set_secret(joined.secret);
  *response.mutable_shard_map() = EncodeShardMap(joined.epoch, joined.shard_map);
  *response.mutable_directive() = EncodeDirective(joined.directive);
  return absl::OkStatus();
}
std::string JoinKey(const v1::JoinSessionRequest& request) { return SessionKey(request.name()); }

// Takes the fields that `step`, a ReportStepRequest or one of its earlier steps, has of its own.
template <typename Step>
absl::Status TakeStep(const Step& step, StepReport& report) {
  report.step = step.step();
  report.loss = step.loss();
  report.samples = step.samples();
  report.finite = step.finite();
  report.learning_rate = step.learning_rate();
  if (!(step.seconds_ago() >= 0 && step.seconds_ago() <= kMostSecondsAgo)) {
    return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                          absl::StrCat("step ", report.step, " seconds_ago: expected 0 to ", kMostSecondsAgo, ", got ",
                                       step.seconds_ago()));
  }
  report.ago = absl::Seconds(step.seconds_ago());
  return absl::OkStatus();
}

absl::Status ReportStep(const v1::ReportStepRequest& request, v1::ReportStepResponse& response,
                        SessionSubject& subject) {
  trace::Operation::Annotate("precondor.session_id", absl::StrCat(request.session_id()));
  trace::Operation::Annotate("precondor.step", static_cast<int64_t>(request.step()));
  trace::Operation::Annotate("precondor.rank", int64_t{request.rank()});
  const StepReport sender{.session_id = request.session_id(),
                          .epoch = request.epoch(),
                          .rank = request.rank(),
                          .incarnation = request.incarnation()};
  std::vector<StepReport> reports(static_cast<size_t>(request.earlier_size()) + 1, sender);
  if (reports.size() > kReportLimit) {
    return ReasonedStatus(
        absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
        absl::StrCat("earlier: expected at most ", kReportLimit - 1, " steps, got ", request.earlier_size()));
  }
  for (int i = 0; i < request.earlier_size(); ++i) {
    PRECONDOR_RETURN_IF_ERROR(TakeStep(request.earlier(i), reports[i]));
  }
  PRECONDOR_RETURN_IF_ERROR(TakeStep(request, reports.back()));
  for (const StepReport& report : reports) {
    PRECONDOR_ASSIGN_OR_RETURN(const Directive directive,
                               subject.coordinator.ReportStep(report, SessionCaller::Showing(request.secret())));
    if (report.rank == 0) subject.steps.End(report);
    if (&report == &reports.back()) *response.mutable_directive() = EncodeDirective(directive);
  }
  return absl::OkStatus();
}

absl::Status LeaveSession(const v1::LeaveSessionRequest& request, v1::LeaveSessionResponse&, SessionSubject& subject) {
  return subject.coordinator.LeaveSession(request.session_id(), request.rank(), request.incarnation(),
                                          SessionCaller::Showing(request.secret()));
}
std::string LeaveKey(const v1::LeaveSessionRequest& request) { return absl::StrCat("leave ", request.session_id()); }

absl::Status CloseSession(const v1::CloseSessionRequest& request, v1::CloseSessionResponse& response,
                          SessionSubject& subject, const grpc::CallbackServerContext& context) {
  trace::Operation::Annotate("precondor.session", request.name());
  PRECONDOR_ASSIGN_OR_RETURN(
      const bool existed,
      subject.coordinator.CloseSession(request.name(), WithSecret(subject.caller(context), request.secret())));
  response.set_existed(existed);
  return absl::OkStatus();
}
std::string CloseKey(const v1::CloseSessionRequest& request) { return SessionKey(request.name()); }

}  // namespace

SessionService::SessionService(Coordinator& coordinator, ControlRunner& runner, CallerFn caller)
    : ControlService(runner), subject_{coordinator, std::move(caller), SessionSteps(runner)} {
  ServeInOrder(OpenKey, OpenSession, subject_);
  ServeInOrder(JoinKey, JoinSession, subject_);
  Serve(ReportStep, subject_);  // in no order: one report at a time waits for the journal, and none waits for that one
  ServeInOrder(LeaveKey, LeaveSession, subject_);
  ServeInOrder(CloseKey, CloseSession, subject_);
}

}  // namespace precondor::rpc
