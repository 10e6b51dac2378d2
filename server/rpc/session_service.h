// SPDX-License-Identifier: Apache-2.0
// SessionService: lets workers open, join, leave and close a coordinator's sessions, and report steps.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/core/coordinator/coordinator.h"
#include "server/rpc/control_service.h"

namespace precondor::rpc {

// Returns the caller of a call; see ServerSecurity::CallerOf.
using CallerFn = std::function<SessionCaller(const grpc::CallbackServerContext& context)>;

// The spans of whole steps. Rank 0 defines a step's span: it lasts from the rank's previous report, or for the first
// report from its JoinSession, to its report of the step. Does nothing without a tracer. Thread-safe.
class SessionSteps {
 public:
  // Lifetime: `runner` outlives this object.
  explicit SessionSteps(ControlRunner& runner) : runner_(runner) {}
  void Begin(uint64_t session_id);
  void End(const StepReport& report);

 private:
  static constexpr size_t kMostStepSpans = 10000;
  ControlRunner& runner_;
  Mutex mu_;
  absl::flat_hash_map<uint64_t, absl::Time> began_ ABSL_GUARDED_BY(mu_);  // by session id; empty without a tracer
};

// The service's handlers use this. Lifetime: `coordinator` outlives it.
struct SessionSubject {
  Coordinator& coordinator;
  CallerFn caller;
  SessionSteps steps;
};

// Implements v1.SessionService for a Coordinator. Thread-safe. Lifetime: both references outlive the service.
class SessionService final : public ControlService {
 public:
  SessionService(Coordinator& coordinator, ControlRunner& runner, CallerFn caller);

 private:
  SessionSubject subject_;
};

}  // namespace precondor::rpc
