// SPDX-License-Identifier: Apache-2.0
#include "server/plane/collective_registry.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {

absl::StatusOr<RendezvousInfo> CollectiveRegistry::Join(const ContributionKey& key, const SessionCaller& caller) {
  PRECONDOR_ASSIGN_OR_RETURN(ShardDataPlane::SessionPart part, shard_.PartOf(key, caller));
  const std::string what = absl::StrCat("session \"", part.spec.name, "\" epoch ", key.epoch);
  if (part.spec.data_plane != DataPlane::kCollective) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": the session's data_plane is GRPC"));
  }
  std::unique_ptr<ShardCollectiveSession> former;  // destroyed, which joins its thread, after mu_ is released
  MutexLock lock(mu_);
  if (stopped_) return absl::UnavailableError(absl::StrCat(what, ": the shard is shutting down"));
  if (const auto known = planes_.find(key.session_id); known != planes_.end() && known->second->epoch() == key.epoch) {
    const absl::Status status = known->second->status();
    if (status.ok()) return known->second->rendezvous_info();
    return absl::FailedPreconditionError(absl::StrCat(what, ": the communicator has ended: ", status.message()));
  }
  if (const auto known = planes_.find(key.session_id); known != planes_.end() && known->second->epoch() > key.epoch) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": epoch ", known->second->epoch(), " has begun"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(PlaneTransport::Rendezvous rendezvous, transport_.open());
  std::unique_ptr<ShardCollectiveSession>& plane = planes_[key.session_id];
  former = std::exchange(
      plane, std::make_unique<ShardCollectiveSession>(shard_, logger_, observer_, transport_, std::move(rendezvous),
                                                      key.session_id, key.epoch, std::move(part), timeout_));
  if (former != nullptr) former->End(absl::StrCat("epoch ", key.epoch, " has begun"));
  return plane->rendezvous_info();
}

absl::Status CollectiveRegistry::Decline(const ContributionKey& key, absl::string_view why,
                                         const SessionCaller& caller) {
  PRECONDOR_RETURN_IF_ERROR(Join(key, caller).status());  // opens the rendezvous if no rank has called yet
  MutexLock lock(mu_);
  const auto plane = planes_.find(key.session_id);
  if (plane == planes_.end() || plane->second->epoch() != key.epoch) return absl::OkStatus();
  plane->second->End(absl::StrCat("rank ", key.rank, " cannot take part: ", why), /*in_order=*/false);
  return absl::OkStatus();
}

void CollectiveRegistry::Sweep() {
  std::vector<std::unique_ptr<ShardCollectiveSession>> over;
  {
    MutexLock lock(mu_);
    for (auto plane = planes_.begin(); plane != planes_.end();) {
      const auto next = std::next(plane);
      if (!shard_.IsInEpoch(plane->first, plane->second->epoch())) {
        over.push_back(std::move(plane->second));
        planes_.erase(plane);
      }
      plane = next;
    }
  }
  for (const auto& plane : over) plane->End("the epoch is over");
}

bool CollectiveRegistry::busy() const {
  MutexLock lock(mu_);
  return std::any_of(planes_.begin(), planes_.end(), [](const auto& plane) { return plane.second->busy(); });
}

void CollectiveRegistry::Stop() {
  Planes ended;
  {
    MutexLock lock(mu_);
    stopped_ = true;
    ended.swap(planes_);
  }
  for (const auto& [session, plane] : ended) plane->End("the shard is shutting down");
}

}  // namespace precondor
