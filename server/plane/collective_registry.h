// SPDX-License-Identifier: Apache-2.0
// The communicators in which a shard takes part: one for each session with data_plane COLLECTIVE, in its current epoch.
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

// Opens the rendezvous of a session's epoch when the first rank joins, and ends its communicator when the epoch is
// over. Thread-safe.
class CollectiveRegistry {
 public:
  // `timeout` limits the rendezvous and every operation. Lifetime: the references outlive this object.
  CollectiveRegistry(ShardDataPlane& shard, Logger& logger, TransferObserver& observer, PlaneTransport transport,
                     absl::Duration timeout)
      : shard_(shard), logger_(logger), observer_(observer), transport_(std::move(transport)), timeout_(timeout) {}
  ~CollectiveRegistry() { Stop(); }

  // Returns the rendezvous of the key's session and epoch, which all its ranks share. The first call opens it and ends
  // the communicator of an earlier epoch. Returns FAILED_PRECONDITION if the session's data plane is gRPC, if the
  // communicator of this epoch has ended (with the reason), or if a later epoch has begun; UNAVAILABLE after Stop; or
  // the errors of ShardDataPlane::PartOf and PlaneTransport::open.
  absl::StatusOr<RendezvousInfo> Join(const ContributionKey& key, const SessionCaller& caller = {});
  // Ends the communicator of the key's session and epoch for all ranks, because the key's rank cannot take part.
  // Returns the errors of Join.
  absl::Status Decline(const ContributionKey& key, absl::string_view why, const SessionCaller& caller = {});
  // Ends the communicators whose session or epoch is over. The server calls it at intervals.
  void Sweep();
  // Returns whether any communicator is in the middle of a step.
  bool busy() const;
  // Ends all communicators. Join fails from then on.
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
