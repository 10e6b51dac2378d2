// SPDX-License-Identifier: Apache-2.0
// A ring that a stream has mapped: which layer's gradient lies where in it.
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

namespace precondor {

// A layer's slot is laid out with its first gradient and stays where it is. Thread-safe.
class RingSlots {
 public:
  explicit RingSlots(std::unique_ptr<SharedRing> memory) : memory_(std::move(memory)) {}

  // What a gradient of `bytes` takes.
  static uint64_t SlotBytes(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // The layer's slot, which is the shard's from now on; its offset. Unavailable: it is already, or the ring is full.
  absl::StatusOr<uint64_t> Take(uint32_t layer, uint64_t bytes) {
    MutexLock lock(mu_);
    auto found = slots_.find(layer);
    if (found == slots_.end()) {
      const uint64_t size = static_cast<uint64_t>(memory_->bytes());
      if (SlotBytes(bytes) > size - used_) {
        return absl::UnavailableError(absl::StrCat("the ring of ", size, " bytes has no room for layer ", layer, "'s ",
                                                   bytes, ": a larger --device-plane-bytes of the shard gives more"));
      }
      found = slots_.emplace(layer, Slot{used_, false}).first;
      used_ += SlotBytes(bytes);
    }
    if (found->second.taken) {
      return absl::UnavailableError(absl::StrCat("layer ", layer, "'s last gradient is not answered yet"));
    }
    found->second.taken = true;
    return found->second.offset;
  }
  // Its answer has been taken out, or it was never sent.
  void GiveBack(uint32_t layer) {
    MutexLock lock(mu_);
    slots_.at(layer).taken = false;
  }
  float* at(uint64_t offset) const { return memory_->data() + offset / sizeof(float); }

 private:
  static constexpr uint64_t kAlignment = 256;
  struct Slot {
    uint64_t offset = 0;
    bool taken = false;
  };
  const std::unique_ptr<SharedRing> memory_;
  Mutex mu_;
  std::map<uint32_t, Slot> slots_ ABSL_GUARDED_BY(mu_);
  uint64_t used_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
