// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/payload_path.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/clock.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/unix_address.h"
#include "proto/wire/slot_table.h"

namespace precondor {

// --- one payload --------------------------------------------------------------------------------------------------

absl::Span<const uint8_t> PayloadPath::Describe(const Contribution& item, const wire::Chunk& chunk,
                                                v1::FrameHeader& header) {
  header.set_chunk_offset(chunk.offset);
  header.set_payload_bytes(item.region == nullptr ? item.payload.size() : item.slot.bytes);
  if (item.region != nullptr) header.set_ring_offset(item.slot.offset);
  return item.payload.subspan(chunk.offset, chunk.size);
}

absl::StatusOr<bool> PayloadPath::Receive(const Contribution& item, const v1::FrameHeader& header,
                                          const wire::ReceivedBytes& payload) {
  if (header.chunk_offset() == 0) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<wire::TensorFormat> tensors,
                               wire::DecodeTensorHeaders(header.tensors()));
    PRECONDOR_RETURN_IF_ERROR(item.result->Begin(tensors, header.payload_bytes()));
  }
  PRECONDOR_RETURN_IF_ERROR(item.result->Append(header.chunk_offset(), payload));
  return item.result->HasAllBytes();
}

void PayloadPath::TakeFromSlot(const Contribution& item, const v1::FrameHeader& header,
                               const wire::ReceivedBytes& payload, std::function<void(const absl::Status&)> done) {
  const bool expected = item.region != nullptr && item.region->Holds(item.slot) &&
                        header.ring_offset() == item.slot.offset && header.payload_bytes() == item.slot.bytes &&
                        payload.size() == 0;
  if (!expected) return done(absl::InternalError("result: expected it where its gradient lay, got another place"));
  item.result->TakeFromSlot(item.region->at(item.slot), item.region->in_use(), std::move(done));
}

// --- slots --------------------------------------------------------------------------------------------------------

absl::StatusOr<PayloadPath::Place> PayloadPath::TakeSlot(const std::shared_ptr<DevicePlane>& memory,
                                                         absl::FunctionRef<uint64_t()> wanted, uint32_t layer,
                                                         uint64_t bytes, absl::Time deadline) {
  const absl::Time until = std::min(deadline, MonotonicNow() + options_.connect_timeout);
  PRECONDOR_ASSIGN_OR_RETURN(const bool asks, AwaitStream(memory, wanted, until));
  if (asks) write_();
  MutexLock lock(mu_);
  if (!overdue_) {
    overdue_ = !changed_.wait_until(mu_, SteadyTime(until), [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const bool asking = state_ == RegionState::kToAsk || state_ == RegionState::kAsked;
      return !waits_ || !open_ || !asking;
    });
  }
  if (state_ == RegionState::kRefused) return refusal_;
  if (state_ != RegionState::kOpen || memory_ != memory) {
    return absl::UnavailableError(absl::StrCat("shard ", options_.address, ": no ring of this device"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(const wire::Slot slot, region_->Take(layer, bytes));
  return Place{region_, slot};
}

absl::StatusOr<bool> PayloadPath::AwaitStream(const std::shared_ptr<DevicePlane>& memory,
                                              absl::FunctionRef<uint64_t()> wanted, absl::Time until) {
  MutexLock lock(mu_);
  // Other gradients, perhaps for other shards, wait behind this one in the send queue: wait only once for an
  // unreachable shard.
  if (!overdue_) {
    overdue_ = !changed_.wait_until(mu_, SteadyTime(until),
                                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !waits_ || open_; });
  }
  if (!waits_ || !open_) return absl::UnavailableError(absl::StrCat("shard ", options_.address, ": no stream"));
  if (state_ != RegionState::kNone) return false;
  PRECONDOR_ASSIGN_OR_RETURN(const v1::Ring* const offer, FindOffer(memory->device()));
  memory_ = memory;
  request_ = *offer;
  request_.set_bytes(std::min(wanted(), offer->bytes()));
  state_ = RegionState::kToAsk;
  return true;
}

absl::Status PayloadPath::SlotStatus(absl::string_view device) const {
  MutexLock lock(mu_);
  // A shard offers no region at an address that is not unix:, so the answer is known without a stream.
  if (!UnixPath(options_.address).has_value()) return FindOffer(device).status();
  if (!open_) return absl::OkStatus();
  if (state_ == RegionState::kRefused) return refusal_;
  return FindOffer(device).status();
}

absl::StatusOr<const v1::Ring*> PayloadPath::FindOffer(absl::string_view device) const {
  const v1::Ring* offer = nullptr;
  for (const v1::Ring& each : offers_) {
    if (each.kind() == v1::RING_KIND_CUDA) offer = &each;
  }
  if (offer == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "shard ", options_.address, ": offers no ring: it gives one at a unix: address with --device-plane-bytes"));
  }
  if (!device.empty() && offer->device() != device) {
    return absl::UnavailableError(
        absl::StrCat("shard ", options_.address, ": computes on another device than the gradient's"));
  }
  return offer;
}

void PayloadPath::StopWaiting() {
  MutexLock lock(mu_);
  waits_ = false;
  changed_.notify_all();
}

absl::Status PayloadPath::CheckSlot(const Contribution& item) {
  if (item.region == nullptr || item.region->Holds(item.slot)) return absl::OkStatus();
  return absl::UnavailableError("the ring is gone");
}

void PayloadPath::GiveBack(const Contribution& item) {
  if (item.region == nullptr) return;
  item.region->GiveBack(item.slot);
  MutexLock lock(mu_);
  expired_.erase(item.id);
}

void PayloadPath::Expire(const Contribution& item) {
  if (!CheckSlot(item).ok() || item.region == nullptr) return;
  MutexLock lock(mu_);
  expired_[item.id] = {item.region, item.slot};
}

bool PayloadPath::OnLateAnswer(const ContributionId& id, const Item& waiting, bool in_slot) {
  MutexLock lock(mu_);
  const auto expired = expired_.find(id);
  if (expired == expired_.end() || (waiting != nullptr && !in_slot)) return false;
  expired->second.region->GiveBack(expired->second.slot);
  expired_.erase(expired);
  return true;
}

// --- the stream ---------------------------------------------------------------------------------------------------

void PayloadPath::OnStreamOpen(const v1::ExchangeResponse& credit) {
  MutexLock lock(mu_);
  open_ = true;
  overdue_ = false;
  offers_.assign(credit.ring_offers().begin(), credit.ring_offers().end());
  changed_.notify_all();
}

void PayloadPath::OnStreamClosing() {
  MutexLock lock(mu_);
  open_ = false;
  changed_.notify_all();
}

void PayloadPath::OnStreamEnd() {
  absl::flat_hash_map<ContributionId, Place> expired;  // unmapped after the lock is released
  std::shared_ptr<RegionSlots> region;
  MutexLock lock(mu_);
  open_ = false;
  region = std::move(region_);
  if (region != nullptr) region->Close();
  state_ = RegionState::kNone;
  offers_.clear();
  expired.swap(expired_);
  changed_.notify_all();
}

std::optional<v1::Ring> PayloadPath::TakeRequest() {
  MutexLock lock(mu_);
  if (state_ != RegionState::kToAsk) return std::nullopt;
  state_ = RegionState::kAsked;
  return request_;
}

void PayloadPath::OnGranted(const v1::Ring& granted) {
  std::shared_ptr<DevicePlane> memory;
  {
    MutexLock lock(mu_);
    if (state_ != RegionState::kAsked) return;
    memory = memory_;
  }
  if (const absl::Status status = wire::CheckRegion(granted, memory->device()); !status.ok()) {
    return OnRefused(status);
  }
  absl::StatusOr<std::unique_ptr<SharedRegion>> mapped =
      memory->Map(granted.handle(), static_cast<int64_t>(granted.bytes()));
  if (!mapped.ok()) return OnRefused(mapped.status());
  // unmapped after the lock is released, if the stream has ended
  auto slots = std::make_shared<RegionSlots>(*std::move(mapped));
  MutexLock lock(mu_);
  if (state_ != RegionState::kAsked) return;
  region_ = std::move(slots);
  state_ = RegionState::kOpen;
  overdue_ = false;
  changed_.notify_all();
}

void PayloadPath::OnRefused(const absl::Status& status) {
  MutexLock lock(mu_);
  state_ = RegionState::kRefused;
  overdue_ = false;
  refusal_ = absl::UnavailableError(absl::StrCat("shard ", options_.address, ": ", status.message()));
  changed_.notify_all();
}

}  // namespace precondor
