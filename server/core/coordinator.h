// SPDX-License-Identifier: Apache-2.0
// The coordinator: who takes part in each session, which shard owns which layer, which mode each step has.
// Off the data path. Decisions are pure functions in server/policy; this class keeps the state they act on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "kernels/methods/registry.h"
#include "server/core/method_factory.h"
#include "server/core/observer.h"
#include "server/core/shard_control.h"
#include "server/policy/lease.h"

namespace precondor {

class CoordinatorSession;

struct Directive {
  uint64_t lease_through_step = 0;
  std::vector<ModeInterval> modes;
  uint64_t epoch = 0;
};

struct ShardAssignment {
  std::string address;
  std::vector<uint32_t> layers;
};

struct OpenResult {
  uint64_t session_id = 0;
  bool created = false;
  SessionSpec spec;
};

struct JoinResult {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  bool active = false;
  std::vector<ShardAssignment> shard_map;
  Directive directive;
  SessionSpec spec;
};

struct StepReport {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  uint64_t step = 0;
  double loss = 0;
  uint64_t samples = 1;
  bool finite = true;
  double learning_rate = 0;
};

struct CoordinatorSessionSummary {
  uint64_t session_id = 0;
  SessionSpec spec;
  uint64_t epoch = 0;
  uint32_t joined = 0;
  uint64_t last_step = 0;
  Mode mode = Mode::kSecondOrder;
  double loss = 0;
  std::vector<ShardAssignment> shard_map;
};

struct ShardEndpoint {
  std::string address;  // as configured; workers dial the shard's advertised address when it has one
  std::unique_ptr<ShardControl> control;
};

struct CoordinatorOptions {
  uint64_t lease_steps = 64;  // steps that a directive grants beyond the one reported
  MethodFactory make_method = MakeMethod;
};

// Thread-safe; calls block while shards are asked, so that servers run them off their RPC threads. Errors are those
// of session.proto, with an ErrorReason attached.
class Coordinator {
 public:
  Coordinator(CoordinatorOptions options, std::vector<ShardEndpoint> shards, const Clock& clock, Logger& logger,
              Observer& observer);
  ~Coordinator();

  absl::StatusOr<OpenResult> OpenSession(const SessionSpec& spec);
  absl::StatusOr<JoinResult> JoinSession(absl::string_view name, uint32_t rank, uint64_t incarnation);
  absl::StatusOr<Directive> ReportStep(const StepReport& report);
  absl::Status LeaveSession(uint64_t session_id, uint32_t rank, uint64_t incarnation);
  absl::StatusOr<bool> CloseSession(absl::string_view name);

  std::vector<CoordinatorSessionSummary> ListSessions() const;
  std::vector<std::string> ShardAddresses() const;
  // From now on OpenSession is Unavailable (DRAINING).
  void BeginDrain();
  // Gives up on shards that do not answer: calls under way end as Cancelled, and so will all later ones.
  void CancelShardCalls();

 private:
  // A place in the table; `state` is null while the session is being opened. While an operation that asks shards is
  // under way the place is busy and others like it wait, so that shards hear of changes in order and no lock is held.
  struct Place {
    bool busy = false;
    std::shared_ptr<CoordinatorSession> state;
  };
  // One operation's turn on a session: waits in the constructor, gives up the place in the destructor.
  class Turn;

  struct Plan {
    std::vector<ShardAssignment> shard_map;
    std::vector<std::vector<uint32_t>> layers_of_shard;
  };
  absl::StatusOr<std::shared_ptr<CoordinatorSession>> CreateSession(const SessionSpec& spec);
  absl::StatusOr<Plan> MakePlan(const SessionSpec& spec);
  // Has sessions removed from the shard that this coordinator does not know: left behind by one that was restarted, or
  // by an Install that was given up on and came through later. Takes what that frees off the description.
  void RemoveOrphans(const ShardEndpoint& shard, ShardDescription& description);
  absl::Status InstallOnShards(const std::vector<SessionInstall>& installs) const;
  absl::Status RemoveFromShards(uint64_t session_id, const std::vector<std::vector<uint32_t>>& layers_of_shard) const;
  uint64_t NextSessionId() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PublishCount();

  // Const after construction.
  const CoordinatorOptions options_;
  const std::vector<ShardEndpoint> shards_;
  const Clock& clock_;
  Logger& logger_;
  Observer& observer_;

  mutable Mutex mu_;
  CondVar place_freed_;
  absl::flat_hash_map<std::string, Place> places_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint64_t, std::shared_ptr<CoordinatorSession>> by_id_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<uint64_t> opening_ ABSL_GUARDED_BY(mu_);  // ids that shards may hear of and by_id_ lacks
  uint64_t last_session_id_ ABSL_GUARDED_BY(mu_) = 0;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor
