// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/slot_table.h"

#include <iterator>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"

namespace precondor::wire {
namespace {

absl::Status MalformedRing(const absl::AlphaNum& what) { return MalformedError(absl::StrCat("ring: ", what)); }

}  // namespace

absl::StatusOr<Slot> SlotTable::Take(uint64_t offset, uint64_t bytes) {
  if (offset % kAlignment != 0)
    return MalformedRing(absl::StrCat("expected a multiple of ", kAlignment, ", got ", offset));
  if (bytes == 0 || bytes > bytes_ || offset > bytes_ - bytes) {
    return MalformedRing(absl::StrCat("expected ", bytes, " bytes within ", bytes_, ", got them from offset ", offset));
  }
  MutexLock lock(mu_);
  if (closed_) return absl::FailedPreconditionError("ring: expected an open one, got one that has ended");
  const auto next = slots_.lower_bound(offset);
  const bool meets_next = next != slots_.end() && next->first < offset + bytes;
  const bool meets_last = next != slots_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > offset;
  if (meets_next || meets_last) {
    return MalformedRing(
        absl::StrCat("offset ", offset, ": expected a range whose last answer has come, got one that is the shard's"));
  }
  return slots_[offset] = Slot{offset, bytes, ++last_generation_};
}

bool SlotTable::GiveBack(const Slot& slot) {
  MutexLock lock(mu_);
  if (!HoldsLocked(slot)) return false;
  slots_.erase(slot.offset);
  return true;
}

bool SlotTable::Holds(const Slot& slot) const {
  MutexLock lock(mu_);
  return HoldsLocked(slot);
}

bool SlotTable::HoldsLocked(const Slot& slot) const {
  const auto found = slots_.find(slot.offset);
  return found != slots_.end() && found->second.generation == slot.generation;
}

void SlotTable::Close() {
  MutexLock lock(mu_);
  slots_.clear();
  closed_ = true;
}

size_t SlotTable::in_use() const {
  MutexLock lock(mu_);
  return slots_.size();
}

v1::Ring EncodeRegion(const std::string& device, uint64_t bytes, const std::string& handle) {
  v1::Ring ring;
  ring.set_kind(v1::RING_KIND_CUDA);
  ring.set_device(device);
  ring.set_bytes(bytes);
  ring.set_handle(handle);
  return ring;
}

absl::Status CheckRegion(const v1::Ring& got, const std::string& device) {
  if (got.kind() == v1::RING_KIND_CUDA && got.device() == device && got.bytes() > 0) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
      absl::StrCat("ring: expected ", v1::RingKind_Name(v1::RING_KIND_CUDA),
                   " on the device that was offered, and bytes above 0, got kind ", static_cast<int>(got.kind()),
                   got.device() == device ? "" : ", another device", " and ", got.bytes(), " bytes"));
}

}  // namespace precondor::wire
