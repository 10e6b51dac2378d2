// SPDX-License-Identifier: Apache-2.0
// A link's ring: asked for once a stream, and gone with it.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/cpp/src/shard_link.h"
#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"

namespace precondor {

absl::StatusOr<ShardLink::RingPlace> ShardLink::TakeRingPlace(const std::shared_ptr<DevicePlane>& plane,
                                                              absl::FunctionRef<uint64_t()> wanted, uint32_t layer,
                                                              uint64_t bytes, absl::Time deadline) {
  const auto until = SteadyTime(std::min(deadline, MonotonicNow() + options_.connect_timeout));
  MutexLock lock(mu_);
  const auto given_up = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !failed_.ok() || !waits_for_rings_; };
  // Others wait behind this gradient, which may be for shards that are there: one wait says enough.
  if (!ring_overdue_) {
    ring_overdue_ = !changed_.wait_until(
        mu_, until, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return given_up() || state_ == StreamState::kOpen; });
  }
  if (given_up() || state_ != StreamState::kOpen) {
    return absl::UnavailableError(absl::StrCat("shard ", options_.address, ": no stream"));
  }
  if (ring_state_ == RingState::kNone) PRECONDOR_RETURN_IF_ERROR(AskForRing(plane, wanted));
  if (!ring_overdue_) {
    ring_overdue_ = !changed_.wait_until(mu_, until, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const bool asking = ring_state_ == RingState::kToAsk || ring_state_ == RingState::kAsked;
      return given_up() || state_ != StreamState::kOpen || !asking;
    });
  }
  if (ring_state_ == RingState::kRefused) return ring_refusal_;
  if (ring_state_ != RingState::kOpen || ring_ == nullptr || ring_plane_ != plane) {
    return absl::UnavailableError(absl::StrCat("shard ", options_.address, ": no ring of this device"));
  }
  absl::StatusOr<uint64_t> offset = ring_->Take(layer, bytes);
  if (!offset.ok()) return offset.status();
  return RingPlace{ring_, *offset};
}

void ShardLink::StopWaitingForRings() {
  MutexLock lock(mu_);
  waits_for_rings_ = false;
  changed_.notify_all();
}

absl::Status ShardLink::RingStatus(const DevicePlane* plane) const {
  MutexLock lock(mu_);
  // Peers at other addresses are offered none, and that need not be found out.
  if (!UnixPath(options_.address).has_value()) return OfferedRing(plane).status();
  if (state_ != StreamState::kOpen) return absl::OkStatus();
  if (ring_state_ == RingState::kRefused) return ring_refusal_;
  return OfferedRing(plane).status();
}

absl::StatusOr<const v1::Ring*> ShardLink::OfferedRing(const DevicePlane* plane) const {
  const v1::Ring* offer = nullptr;
  for (const v1::Ring& each : ring_offers_) {
    if (each.kind() == v1::RING_KIND_CUDA) offer = &each;
  }
  if (offer == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "shard ", options_.address, ": offers no ring: it gives one at a unix: address with --device-plane-bytes"));
  }
  if (plane != nullptr && offer->device() != plane->device()) {
    return absl::UnavailableError(
        absl::StrCat("shard ", options_.address, ": computes on another device than the gradient's"));
  }
  return offer;
}

absl::Status ShardLink::AskForRing(const std::shared_ptr<DevicePlane>& plane, absl::FunctionRef<uint64_t()> wanted) {
  PRECONDOR_ASSIGN_OR_RETURN(const v1::Ring* const offer, OfferedRing(plane.get()));
  ring_plane_ = plane;
  ring_request_ = *offer;
  ring_request_.set_bytes(std::min(wanted(), offer->bytes()));
  ring_state_ = RingState::kToAsk;
  Pump();
  return absl::OkStatus();
}

void ShardLink::OnRing(const v1::Ring& granted) {
  std::shared_ptr<DevicePlane> plane;
  {
    MutexLock lock(mu_);
    if (ring_state_ != RingState::kAsked) return;
    plane = ring_plane_;
  }
  absl::StatusOr<std::unique_ptr<SharedRing>> memory =
      plane->Map(granted.handle(), static_cast<int64_t>(granted.bytes()));
  if (!memory.ok()) return OnRingRefused(memory.status());
  auto slots = std::make_shared<RingSlots>(*std::move(memory));
  MutexLock lock(mu_);
  if (closing_) return;
  ring_ = std::move(slots);
  ring_state_ = RingState::kOpen;
  ring_overdue_ = false;
  changed_.notify_all();
}

void ShardLink::OnRingRefused(const absl::Status& status) {
  MutexLock lock(mu_);
  ring_state_ = RingState::kRefused;
  ring_overdue_ = false;
  ring_refusal_ = absl::UnavailableError(absl::StrCat("shard ", options_.address, ": ", status.message()));
  changed_.notify_all();
}

void ShardLink::GiveSlotBack(const Contribution& item) {
  if (item.ring == nullptr) return;
  item.ring->GiveBack(item.id.layer);
  expired_in_ring_.erase(item.id);
}

bool ShardLink::OnAnswerOfExpired(const ContributionId& id, const Outbox::Item& waiting, bool in_ring) {
  const auto expired = expired_in_ring_.find(id);
  if (expired == expired_in_ring_.end() || (waiting != nullptr && !in_ring)) return false;
  expired->second->GiveBack(id.layer);
  expired_in_ring_.erase(expired);
  return true;
}

void ShardLink::MoveOutOfRing() {
  std::vector<Outbox::Item> items;
  std::shared_ptr<RingSlots> ring;  // unmapped after the lock
  {
    MutexLock lock(mu_);
    ring = std::move(ring_);
    ring_state_ = RingState::kNone;
    ring_offers_.clear();
    expired_in_ring_.clear();
    items = outbox_.Items();
    changed_.notify_all();
  }
  for (const Outbox::Item& item : items) {
    if (item->ring == nullptr) continue;
    absl::StatusOr<Outbox::Item> on_host = item->on_host();
    {
      MutexLock lock(mu_);
      if (on_host.ok()) {
        outbox_.Replace(item, *std::move(on_host));
        continue;
      }
      if (outbox_.Holds(item)) outbox_.Remove(item->id);
    }
    item->result->Fail(on_host.status());
  }
}

}  // namespace precondor
