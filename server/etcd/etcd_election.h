// SPDX-License-Identifier: Apache-2.0
// One leader among the coordinators of a deployment: the one whose lease holds the key <prefix>/leader.
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
  std::string prefix = "/precondor/coordinator";  // one a deployment
  std::string identity;                           // of this candidate, for people and for the next leader's log
  absl::Duration lease_ttl = absl::Seconds(10);   // whole seconds; etcd allows no fewer than a few of its heartbeats
  absl::Duration retry = absl::Seconds(1);        // between looks at the key of another leader
  // Told by Campaign, on its thread, each time that it waits for something else than before: another candidate that
  // leads (FailedPrecondition), or etcd's error. May be null.
  std::function<void(const absl::Status&)> on_waiting;
};

// A candidate leads from the moment Campaign returns OK until its lease may have run out: from then on Check says so,
// permanently. It counts the lease from before the last keep-alive that etcd answered, so that it stops before etcd
// lets another one lead, as long as clocks run at the same rate. A leader that wakes up later than that finds its
// writes refused, because each names the leadership it was made under (EtcdLog). Threads: one of its own, that keeps
// the lease alive; calls may overlap. `client` must outlive the election.
class EtcdElection {
 public:
  // `on_lost` is called once, on the election's thread or in Lose, when leadership is lost other than by Stop; a server
  // ends then, and campaigns anew when it is started again. It must return soon, and neither Stop nor destroy
  // the election.
  EtcdElection(EtcdClient& client, ElectionOptions options, std::function<void(const absl::Status&)> on_lost);
  ~EtcdElection();  // Stop

  // Returns when this candidate leads. Once only. Cancelled after Stop; InvalidArgument or the like when etcd refuses
  // the request itself. While etcd is not to be reached it goes on trying.
  absl::Status Campaign();
  // OK while this candidate leads for sure; else FailedPrecondition.
  absl::Status Check() const;
  // Gives leadership up, so that the next one need not wait for the lease, and ends Campaign.
  void Stop();

  // Of this candidate's leadership: the revision that created the key. After Campaign.
  int64_t revision() const;
  // What came to light elsewhere: another one leads.
  void Lose(const absl::Status& why);

  const std::string& prefix() const { return options_.prefix; }
  std::string LeaderKey() const { return options_.prefix + "/leader"; }

 private:
  using Steady = std::chrono::steady_clock;
  enum class State { kFollower, kLeader, kLost, kStopped };

  // The identity of another candidate that leads; nullopt: this one does.
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
