// SPDX-License-Identifier: Apache-2.0
// Chooses how payloads travel between a worker and one shard: inline, as bytes of the stream's frames; or in slots of a
// region that the shard shares with the worker while the stream lasts. An answer travels as its gradient did, or
// inline.
//
// The region of the stream: kNone -> kToAsk -> kAsked -> kOpen or kRefused. The end of the stream ends every use of its
// slots and sets kNone. A gradient that was in a slot travels inline on the next stream.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/contribution.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/slot_table.h"
#include "proto/wire/tensor_codec.h"

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

// Places and receives the payloads of one link. Thread-safe. Lock order: the link's lock, then mu_. `write` is not
// called under mu_.
class PayloadPath {
 public:
  using Item = std::shared_ptr<const Contribution>;
  struct Options {
    std::string address;             // address of the shard
    absl::Duration connect_timeout;  // longest wait for a stream and its region
  };

  // Calls `write` when TakeRequest has a request for the stream.
  PayloadPath(Options options, std::function<void()> write) : options_(std::move(options)), write_(std::move(write)) {}

  // --- one payload -------------------------------------------------------------------------------------------------

  // Sets the fields of `header` that describe a chunk of the contribution's payload. Returns the bytes to send inline;
  // empty for a payload in a slot, to which the header then refers.
  static absl::Span<const uint8_t> Describe(const Contribution& item, const wire::Chunk& chunk,
                                            v1::FrameHeader& header);
  // Receives a RESULT frame's inline payload. Returns true if the answer is complete. Returns the errors of AnswerSink.
  static absl::StatusOr<bool> Receive(const Contribution& item, const v1::FrameHeader& header,
                                      const wire::ReceivedBytes& payload);
  // Receives the answer that a RESULT frame refers to from the contribution's slot, and then calls `done`, on any
  // thread. `done` keeps `item`. Its status is INTERNAL if the frame refers to another slot, or an error of the device.
  static void TakeFromSlot(const Contribution& item, const v1::FrameHeader& header, const wire::ReceivedBytes& payload,
                           std::function<void(const absl::Status&)> done);

  // --- slots -------------------------------------------------------------------------------------------------------

  // Takes a slot of the current stream's region for a layer's gradient of `bytes`. If the stream has no region,
  // requests one of `wanted()` bytes in `memory`. Waits for the region until `deadline`, at most connect_timeout; after
  // one wait has timed out, no call waits until the shard answers. `wanted` must not call this object. Returns
  // UNAVAILABLE with the reason if the gradient has to travel inline. Do not call under a link's lock.
  struct Place {
    std::shared_ptr<RegionSlots> region;
    wire::Slot slot;
  };
  absl::StatusOr<Place> TakeSlot(const std::shared_ptr<DevicePlane>& memory, absl::FunctionRef<uint64_t()> wanted,
                                 uint32_t layer, uint64_t bytes, absl::Time deadline);
  // Returns OK if a gradient in that memory may get a slot, or if that is not known yet; otherwise the reason why none
  // gets one on this stream. An empty `device` means any device.
  absl::Status SlotStatus(absl::string_view device) const;
  // Makes current and later calls of TakeSlot return without waiting.
  void StopWaiting();
  // Returns UNAVAILABLE for a contribution in a slot whose region has ended.
  static absl::Status CheckSlot(const Contribution& item);
  // Ends the use of the contribution's slot, if it has one: the shard no longer uses it.
  void GiveBack(const Contribution& item);
  // Records that the contribution has expired. Its slot, if it has one, belongs to the shard until the answer.
  void Expire(const Contribution& item);
  // Handles an answer to `id` that may belong to an expired contribution. `waiting` is the unanswered contribution with
  // this id, or null. Returns true, and frees the slot, if the answer is that of the expired contribution.
  bool OnLateAnswer(const ContributionId& id, const Item& waiting, bool in_slot);

  // --- the stream --------------------------------------------------------------------------------------------------

  void OnStreamOpen(const v1::ExchangeResponse& credit);
  // The stream is broken or cancelled, and its end follows.
  void OnStreamClosing();
  // Unmaps the region once no contribution holds it. Call before the next stream can begin, and before a half-close.
  void OnStreamEnd();
  // Returns the request for a region once. It must be written before any other frame.
  std::optional<v1::Ring> TakeRequest();
  // Take in the shard's answer to that request. Do not call OnGranted under a link's lock, because it maps memory.
  void OnGranted(const v1::Ring& granted);
  void OnRefused(const absl::Status& status);

 private:
  enum class RegionState : uint8_t { kNone, kToAsk, kAsked, kOpen, kRefused };

  absl::StatusOr<const v1::Ring*> FindOffer(absl::string_view device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until a stream is open. Returns true if this call decided to request a region.
  absl::StatusOr<bool> AwaitStream(const std::shared_ptr<DevicePlane>& memory, absl::FunctionRef<uint64_t()> wanted,
                                   absl::Time until);

  const Options options_;
  const std::function<void()> write_;

  mutable Mutex mu_;
  CondVar changed_;
  bool waits_ ABSL_GUARDED_BY(mu_) = true;     // false after StopWaiting
  bool open_ ABSL_GUARDED_BY(mu_) = false;     // a stream is open
  bool overdue_ ABSL_GUARDED_BY(mu_) = false;  // a wait for a stream or region has timed out
  std::vector<v1::Ring> offers_ ABSL_GUARDED_BY(mu_);
  RegionState state_ ABSL_GUARDED_BY(mu_) = RegionState::kNone;
  v1::Ring request_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<DevicePlane> memory_ ABSL_GUARDED_BY(mu_);  // memory in which the region is requested
  std::shared_ptr<RegionSlots> region_ ABSL_GUARDED_BY(mu_);  // set in state kOpen
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);                 // set in state kRefused
  absl::flat_hash_map<ContributionId, Place> expired_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
