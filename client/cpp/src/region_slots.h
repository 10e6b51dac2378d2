// SPDX-License-Identifier: Apache-2.0
// Assigns the layers' gradients to slots of a shared region that a worker has mapped.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"
#include "proto/wire/slot_table.h"

namespace precondor {

// Slots of one region. A layer's slot gets its offset with the first gradient and keeps it. Thread-safe.
class RegionSlots {
 public:
  explicit RegionSlots(std::unique_ptr<SharedRegion> memory)
      : memory_(std::move(memory)), table_(static_cast<uint64_t>(memory_->bytes())) {}

  // Begins a use of the layer's slot, which then belongs to the shard. Returns UNAVAILABLE if the shard has the slot
  // already or the region has no room for it.
  absl::StatusOr<wire::Slot> Take(uint32_t layer, uint64_t bytes) {
    MutexLock lock(mu_);
    const auto [place, is_new] = offsets_.try_emplace(layer, used_);
    if (is_new && wire::SlotTable::Aligned(bytes) > table_.bytes() - used_) {
      offsets_.erase(place);
      return absl::UnavailableError(absl::StrCat("the ring of ", table_.bytes(), " bytes has no room for layer ", layer,
                                                 "'s ", bytes,
                                                 ": a larger --device-plane-bytes of the shard gives more"));
    }
    if (is_new) used_ += wire::SlotTable::Aligned(bytes);
    absl::StatusOr<wire::Slot> slot = table_.Take(place->second, bytes);
    if (slot.ok()) return slot;
    return absl::UnavailableError(absl::StrCat("layer ", layer, "'s last gradient is not answered yet"));
  }
  // See SlotTable. Give a slot back once its answer has been copied out, or if it was never sent.
  bool GiveBack(const wire::Slot& slot) { return table_.GiveBack(slot); }
  bool Holds(const wire::Slot& slot) const { return table_.Holds(slot); }
  void Close() { table_.Close(); }
  size_t in_use() const { return table_.in_use(); }
  float* at(const wire::Slot& slot) const { return memory_->data() + slot.offset / sizeof(float); }

 private:
  const std::unique_ptr<SharedRegion> memory_;
  wire::SlotTable table_;
  Mutex mu_;                                                   // taken before the table's lock
  std::map<uint32_t, uint64_t> offsets_ ABSL_GUARDED_BY(mu_);  // of the slots, by layer
  uint64_t used_ ABSL_GUARDED_BY(mu_) = 0;                     // bytes assigned to slots
};

}  // namespace precondor
