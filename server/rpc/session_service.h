// SPDX-License-Identifier: Apache-2.0
// SessionService: lets workers open, join, leave and close a coordinator's sessions, and report steps.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/session.grpc.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/rpc/bounded_handler.h"
#include "server/rpc/unary.h"

namespace precondor::rpc {

// Returns the caller of a call; see ServerSecurity::CallerOf.
// The key of calls about a session of this name, which run one after another.
inline std::string SessionKey(absl::string_view name) { return absl::StrCat("name ", name); }

using CallerFn = std::function<SessionCaller(const grpc::CallbackServerContext& context)>;

// Implements v1.SessionService for a Coordinator. Thread-safe. Lifetime: both references outlive the service.
class SessionService final : public v1::SessionService::CallbackService {
 public:
  SessionService(Coordinator& coordinator, ControlRunner& runner, CallerFn caller)
      : coordinator_(coordinator), runner_(runner), caller_(std::move(caller)) {
    const auto bound = [&](absl::string_view name, auto method) {
      MarkMethodCallback(MethodIndex(name), BoundedHandler(runner, name, WithinBudget(runner, name), this, method));
    };
    bound("SessionService/OpenSession", &SessionService::OpenSession);
    bound("SessionService/JoinSession", &SessionService::JoinSession);
    bound("SessionService/ReportStep", &SessionService::ReportStep);
    bound("SessionService/LeaveSession", &SessionService::LeaveSession);
    bound("SessionService/CloseSession", &SessionService::CloseSession);
  }

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context, const v1::OpenSessionRequest* request,
                                        v1::OpenSessionResponse* response) override;
  grpc::ServerUnaryReactor* JoinSession(grpc::CallbackServerContext* context, const v1::JoinSessionRequest* request,
                                        v1::JoinSessionResponse* response) override;
  grpc::ServerUnaryReactor* ReportStep(grpc::CallbackServerContext* context, const v1::ReportStepRequest* request,
                                       v1::ReportStepResponse* response) override;
  grpc::ServerUnaryReactor* LeaveSession(grpc::CallbackServerContext* context, const v1::LeaveSessionRequest* request,
                                         v1::LeaveSessionResponse* response) override;
  grpc::ServerUnaryReactor* CloseSession(grpc::CallbackServerContext* context, const v1::CloseSessionRequest* request,
                                         v1::CloseSessionResponse* response) override;

 private:
  // Rank 0 defines the span of a whole step: it lasts from the rank's previous report, or for the first report from its
  // JoinSession, to its report of the step. Both calls do nothing without a tracer.
  void BeginStepSpan(uint64_t session_id);
  void EndStepSpan(const StepReport& report);

  static constexpr size_t kMostStepSpans = 10000;
  Coordinator& coordinator_;
  ControlRunner& runner_;
  const CallerFn caller_;
  Mutex mu_;
  absl::flat_hash_map<uint64_t, absl::Time> step_began_ ABSL_GUARDED_BY(mu_);  // by session id; empty without a tracer
};

}  // namespace precondor::rpc
