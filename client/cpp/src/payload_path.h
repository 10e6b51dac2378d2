// SPDX-License-Identifier: Apache-2.0
// How payloads travel between a worker and one shard: inline, as bytes of the stream's frames; in slots of a region
// that the shard shares with the worker for as long as the stream lasts; or over the communicator of their session. An
// answer comes the way that its gradient went, or inline.
//
// The stream's region: kNone -> kToAsk -> kAsked -> kOpen or kRefused. The end of the stream ends every use of its
// slots and makes it kNone: what lay in a slot goes inline on the next stream.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/contribution.h"
#include "client/cpp/src/region_slots.h"
#include "client/cpp/src/traffic.h"
#include "client/cpp/src/worker_collective_session.h"
#include "kernels/base/mutex.h"
#include "kernels/region_memory.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

// Thread-safe. Its lock comes after the link's; it calls no hook under its lock.
class PayloadPath {
 public:
  using Item = std::shared_ptr<const Contribution>;
  struct Options {
    std::string address;             // the shard's
    absl::Duration connect_timeout;  // the longest wait for a stream and its region
    // Of a session with data_plane COLLECTIVE: gradients go over a communicator as far as there is one.
    std::optional<WorkerCollectiveSession::Options> collective;
  };
  struct Hooks {
    std::function<void()> write;  // TakeRequest has something for the stream
    // One gradient's answer over the communicator is complete, or cannot be: `complete` says why.
    std::function<void(Item item, const absl::Status& complete, Preconditioned outcome)> answered;
    std::function<void(const std::vector<ContributionId>&)> to_stream;  // these do not go over the communicator
    // See WorkerCollectiveSession; on its thread.
    std::function<absl::StatusOr<PlaneRendezvous>(uint64_t epoch)> ask;
    std::function<void(uint64_t epoch, const absl::Status& why)> decline;
  };

  // `traffic` outlives the path.
  PayloadPath(Options options, Hooks hooks, TrafficCounters& traffic);

  // --- one payload -------------------------------------------------------------------------------------------------

  // Describes a chunk of the contribution's payload in its frame's header. Returns the bytes that go inline; none for a
  // payload in a slot, which the header then refers to.
  static absl::Span<const uint8_t> Describe(const Contribution& item, const wire::Chunk& chunk,
                                            v1::FrameHeader& header);
  // Takes in a RESULT frame's payload, inline or from the contribution's slot. True when the answer is complete.
  // Errors: Internal for a slot that is not the contribution's; those of AnswerSink.
  static absl::StatusOr<bool> Receive(const Contribution& item, const v1::FrameHeader& header,
                                      const wire::ReceivedBytes& payload);

  // --- slots -------------------------------------------------------------------------------------------------------

  // A slot of the current stream's region for a layer's gradient of `bytes`: asks for a region of `wanted()` bytes in
  // `memory` where there is none yet, and waits for it until `deadline`, at most connect_timeout; once a wait was
  // without effect, no other does before the shard says something. `wanted` must not call back. Unavailable, with the
  // reason, where the gradient has to go inline. Not under a link's lock.
  struct Place {
    std::shared_ptr<RegionSlots> region;
    wire::Slot slot;
  };
  absl::StatusOr<Place> TakeSlot(const std::shared_ptr<RegionMemory>& memory, absl::FunctionRef<uint64_t()> wanted,
                                 uint32_t layer, uint64_t bytes, absl::Time deadline);
  // OK while a gradient in that memory may get a slot, or until that is known; otherwise why none does on this stream.
  // An empty device: any.
  absl::Status SlotStatus(RegionKind kind, absl::string_view device) const;
  // From now on TakeSlot waits for nothing.
  void StopWaiting();
  // Unavailable for a contribution in a slot whose use has ended: its region is gone.
  static absl::Status CheckSlot(const Contribution& item);
  // The shard is done with the contribution's slot, if it has one.
  void GiveBack(const Contribution& item);
  // No caller waits for the contribution any more. Its slot, if it has one, is the shard's until its answer comes.
  void Expire(const Contribution& item);
  // The shard has answered `id`, of which `waiting`, if any, is not answered yet. True when the answer is that of an
  // expired contribution, whose slot it gives back.
  bool OnLateAnswer(const ContributionId& id, const Item& waiting, bool in_slot);

  // --- the stream --------------------------------------------------------------------------------------------------

  void OnStreamOpen(const v1::ExchangeResponse& credit);
  // It is broken or cancelled; its end follows.
  void OnStreamClosing();
  // Before the next stream can begin, and before a half-close: unmaps the region once no contribution holds it.
  void OnStreamEnd();
  // The request for a region, to be written before any other frame; once.
  std::optional<v1::Ring> TakeRequest();
  // The shard's answer to it. Not under a link's lock: it maps memory.
  void OnGranted(const v1::Ring& granted);
  void OnRefused(const absl::Status& status);

  // --- the communicator; all of these do nothing without one ---------------------------------------------------------

  // Whether gradients are offered to it.
  bool has_collective() const { return collective_ != nullptr; }
  // Takes a gradient; false: it goes by the stream.
  bool Offer(const Item& item) { return collective_->Offer(item); }
  // Returns what the former epoch's has not answered.
  std::vector<ContributionId> BeginEpoch(uint64_t epoch);
  void LeaveCollective();
  // Ends its thread: no hook of it is called afterwards. For the link's destructor.
  void EndCollective() { collective_ = nullptr; }
  absl::Status collective_status() const;

 private:
  enum class RegionState : uint8_t { kNone, kToAsk, kAsked, kOpen, kRefused };

  absl::StatusOr<const v1::Ring*> FindOffer(RegionKind kind, absl::string_view device) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until a stream is open; true when the region has to be asked for.
  absl::StatusOr<bool> AwaitStream(const std::shared_ptr<RegionMemory>& memory, absl::FunctionRef<uint64_t()> wanted,
                                   absl::Time until);
  void OnReduced(Item item, const wire::PlaneAnswer& answer, const wire::ReceivedBytes& values);

  const Options options_;
  const Hooks hooks_;
  TrafficCounters& traffic_;

  mutable Mutex mu_;
  CondVar changed_;
  bool waits_ ABSL_GUARDED_BY(mu_) = true;     // TakeSlot does
  bool open_ ABSL_GUARDED_BY(mu_) = false;     // the stream is
  bool overdue_ ABSL_GUARDED_BY(mu_) = false;  // a wait for stream or region has failed
  std::vector<v1::Ring> offers_ ABSL_GUARDED_BY(mu_);
  RegionState state_ ABSL_GUARDED_BY(mu_) = RegionState::kNone;
  v1::Ring request_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<RegionMemory> memory_ ABSL_GUARDED_BY(mu_);  // that the region is asked for in
  std::shared_ptr<RegionSlots> region_ ABSL_GUARDED_BY(mu_);   // kOpen
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);                  // kRefused
  absl::flat_hash_map<ContributionId, Place> expired_ ABSL_GUARDED_BY(mu_);

  std::unique_ptr<WorkerCollectiveSession> collective_;  // last; constant until EndCollective. Its lock comes after mu_
};

}  // namespace precondor
