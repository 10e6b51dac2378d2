// SPDX-License-Identifier: Apache-2.0
// Elects one leader among the coordinators of a deployment: the one whose lease holds the key <prefix>/leader.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/mutex.h"
#include "server/etcd/etcd_client.h"

namespace precondor::etcd {

struct ElectionOptions {
  std::string prefix = "/precondor/coordinator";  // each deployment needs its own
  std::string identity;                           // this candidate's name in messages and in other candidates' logs
  absl::Duration lease_ttl = absl::Seconds(10);   // in whole seconds; etcd requires at least a few of its heartbeats
  absl::Duration retry = absl::Seconds(1);        // pause between Campaign's attempts
  // Called by Campaign, on its thread, each time that the reason why it waits changes: FAILED_PRECONDITION with the
  // identity of another leader, or etcd's error. May be null.
  std::function<void(const absl::Status&)> on_waiting;
};

// One candidate. It leads from when Campaign returns OK until its lease may have expired; from then on Check fails
// permanently. It counts the lease from the time before it sent the last answered keep-alive, so that it stops leading
// before etcd lets another candidate lead, provided that clocks run at the same rate. etcd refuses the writes of a
// leader that was suspended for longer, because each write names the leadership under which it was made (EtcdLog).
// Threads: one thread of its own keeps the lease alive; other calls may overlap. Lifetime: `client` outlives the
// election.
class EtcdElection {
 public:
  // `on_lost` is called once, on the election's thread or in Lose, if leadership is lost other than by Stop. A server
  // then exits, and campaigns again after a restart. `on_lost` must return soon and must neither call Stop nor destroy
  // the election.
  EtcdElection(EtcdClient& client, ElectionOptions options, std::function<void(const absl::Status&)> on_lost);
  ~EtcdElection();  // Stop

  // Returns OK when this candidate leads. Retries while another candidate leads or etcd is not reachable. Call it once.
  // Returns CANCELLED after Stop, or etcd's error (such as INVALID_ARGUMENT) if etcd refuses the request itself.
  absl::Status Campaign();
  // Returns OK while this candidate certainly leads, and FAILED_PRECONDITION otherwise.
  absl::Status Check() const;
  // Gives up leadership, revokes the lease so that the next leader need not wait for it, and ends Campaign.
  void Stop();

  // Returns the revision that created the leader's key, which identifies this leadership. Call it after Campaign.
  int64_t revision() const;
  // Ends the leadership, because the caller has found out that it is lost. Has no effect if this candidate does not
  // lead.
  void Lose(const absl::Status& why);

  const std::string& prefix() const { return options_.prefix; }
  std::string LeaderKey() const { return options_.prefix + "/leader"; }

 private:
  using Steady = std::chrono::steady_clock;
  enum class State { kFollower, kLeader, kLost, kStopped };

  // Tries once to become the leader. Returns nullopt if it succeeds, or the identity of another candidate that leads.
  absl::StatusOr<std::optional<std::string>> TryOnce();
  void KeepAlive();
  void KeepAliveOnce(int64_t lease);

  EtcdClient& client_;
  const ElectionOptions options_;
  const std::function<void(const absl::Status&)> on_lost_;

  mutable Mutex mu_;
  CondVar changed_;
  State state_ ABSL_GUARDED_BY(mu_) = State::kFollower;
  absl::Status lost_ ABSL_GUARDED_BY(mu_);
  int64_t lease_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t revision_ ABSL_GUARDED_BY(mu_) = 0;
  Steady::time_point leads_until_ ABSL_GUARDED_BY(mu_);
  std::thread keeper_;
};

}  // namespace precondor::etcd
