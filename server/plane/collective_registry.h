// SPDX-License-Identifier: Apache-2.0
// The communicators that a shard has part in: one for each session with data_plane COLLECTIVE, for its present epoch.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "server/core/shard/shard_data_plane.h"
#include "server/plane/plane_transport.h"
#include "server/plane/shard_collective_session.h"

namespace precondor {

// Thread-safe.
class CollectiveRegistry {
 public:
  // The references outlive it. `timeout`: of the rendezvous, and of every operation.
  CollectiveRegistry(ShardDataPlane& shard, Logger& logger, TransferObserver& observer, PlaneTransport transport,
                     absl::Duration timeout)
      : shard_(shard), logger_(logger), observer_(observer), transport_(std::move(transport)), timeout_(timeout) {}
  ~CollectiveRegistry() { Stop(); }

  // Where the ranks of the key's session and epoch meet: one rendezvous for all of them. The first call opens the
  // rendezvous. The errors of ShardDataPlane::PartOf; FailedPrecondition: the session's data plane is gRPC, or the
  // communicator of this epoch has ended, with the reason. Unavailable: after Stop, or no rendezvous can be opened.
  absl::StatusOr<RendezvousInfo> Join(const ContributionKey& key, const SessionCaller& caller = {});
  // Ends the communicator of the key's session and epoch for all, since the key's rank cannot take part. The errors of
  // Join.
  absl::Status Decline(const ContributionKey& key, absl::string_view why, const SessionCaller& caller = {});
  // Ends the communicators of epochs and sessions that are over. A server calls it every now and then.
  void Sweep();
  // Whether any is in the middle of a step.
  bool busy() const;
  // Ends all collectives permanently.
  void Stop();

 private:
  using Planes = absl::flat_hash_map<uint64_t, std::unique_ptr<ShardCollectiveSession>>;  // by session

  ShardDataPlane& shard_;
  Logger& logger_;
  TransferObserver& observer_;
  const PlaneTransport transport_;
  const absl::Duration timeout_;

  mutable Mutex mu_;
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
  Planes planes_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
