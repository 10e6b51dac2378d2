// SPDX-License-Identifier: Apache-2.0
// The services of unary calls. Workers call SessionService, a coordinator calls ShardService, operators call
// SnapshotService and AdminService; a worker also restores by SnapshotService what it has read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/admin.pb.h"
#include "precondor/v1/snapshot.pb.h"
#include "server/core/coordinator/coordinator.h"
#include "server/core/shard/shard.h"
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
  void BeginAt(uint64_t session_id, absl::Time time);

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

// Implements v1.ShardService for a Shard. A call runs if the shard's FencingGate admits its fencing token. Thread-safe.
// Lifetime: both references outlive the service.
class ShardService final : public ControlService {
 public:
  ShardService(Shard& shard, ControlRunner& runner);
};

// What the service calls. The functions are thread-safe and return the service's errors. `coordinator` is null if the
// server is not a coordinator; the functions are empty if it is not a shard.
struct SnapshotSubject {
  Coordinator* coordinator = nullptr;
  std::function<absl::StatusOr<std::vector<v1::SnapshotInfo>>()> list;
  std::function<absl::StatusOr<v1::SnapshotInfo>(uint64_t session_id, uint64_t snapshot_id)> verify;
  // Returns true if this piece has completed the layer, which now has the factors.
  std::function<absl::StatusOr<bool>(const v1::RestoreLayerRequest& piece)> restore;
  CallerFn caller;
};

// Implements v1.SnapshotService for a SnapshotSubject. Thread-safe. Lifetime: `runner` and the objects that the subject
// uses outlive the service.
class SnapshotService final : public ControlService {
 public:
  SnapshotService(SnapshotSubject subject, ControlRunner& runner);

 private:
  const SnapshotSubject subject_;
};

// The process that the service reports on. `shard` or `coordinator` is null if the process does not have that role.
// Lifetime: the objects outlive the service.
struct AdminSubject {
  std::string version;
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::string backend;
  Shard* shard = nullptr;
  Coordinator* coordinator = nullptr;
  std::function<absl::Duration()> uptime;
  std::function<bool()> draining;
  std::function<void(absl::Duration deadline)> begin_drain;  // zero means the server's configured deadline
};

// Implements v1.AdminService for an AdminSubject. Thread-safe.
class AdminService final : public ControlService {
 public:
  AdminService(AdminSubject subject, ControlRunner& runner);

 private:
  const AdminSubject subject_;
};

}  // namespace precondor::rpc
