// SPDX-License-Identifier: Apache-2.0
// What one shard has been sent or is still to be sent, and what has not been answered: order, credit, acknowledgement
// and replay, without any I/O.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/session_spec.h"
#include "precondor/client.h"
#include "precondor/v1/common.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

// A contribution within its worker; with session, epoch, rank and incarnation it is the key on the wire.
struct ContributionId {
  v1::FrameKind kind = v1::FRAME_KIND_UNSPECIFIED;  // STATISTICS or GRADIENT
  uint64_t step = 0;
  uint32_t layer = 0;
  bool operator==(const ContributionId&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const ContributionId& id) {
    return H::combine(std::move(h), static_cast<int>(id.kind), id.step, id.layer);
  }
};

// One worker's statistics or gradient of one (step, layer), encoded. Sent as often as it takes, always the same bytes.
struct Contribution {
  ContributionId id;
  Mode mode = Mode::kSecondOrder;
  uint64_t samples = 0;
  bool abstain = false;
  std::vector<v1::TensorHeader> tensors;
  absl::Span<const uint8_t> payload;
  std::shared_ptr<const void> payload_owner;          // keeps `payload` readable
  std::shared_ptr<PreconditionFuture::State> result;  // of a gradient
  absl::Time deadline = absl::InfiniteFuture();       // for its answer
};

// What to do about a contribution that a shard refused.
enum class Recovery : uint8_t {
  kRefused,       // final for this contribution
  kRetryLater,    // the shard is not ready for it: send it again after a pause
  kRefreshEpoch,  // the membership has changed: join again, then send it again
  kFatal,         // final for the worker
};
Recovery RecoveryFor(const absl::Status& refusal);

// Life of an entry: queued -> being sent (one at a time, in order) -> sent -> acknowledged; statistics are then done, a
// gradient waits for its result. One thread at a time (its link's lock).
class Outbox {
 public:
  using Item = std::shared_ptr<const Contribution>;

  // Takes it in at the end of the queue. AlreadyExists when one with this id is not yet done.
  absl::Status Add(Item item);

  // One frame to write: `chunk` of the item's payload.
  struct Frame {
    Item item;
    wire::Chunk chunk;
  };
  // The next frame, marked as written; nothing when the queue is empty, its head waits for its time, or the credit does
  // not allow it. A payload larger than all of the credit goes alone.
  std::optional<Frame> Next(absl::Time now);
  // A new stream with this credit: everything unanswered goes out again, in its order. Without one nothing does.
  void StartStream(uint64_t credit_bytes);
  void StopStream();

  // Answers. Each returns the item it was about; null for one that is not waited for (a late or repeated answer).
  Item Acknowledge(const ContributionId& id);
  Item Find(const ContributionId& id) const;
  Item Remove(const ContributionId& id);
  // Sends it again from `at` on.
  void RetryAt(const ContributionId& id, absl::Time at);
  // Keeps it until the next StartStream.
  void Park(const ContributionId& id);
  // True when `refusal` of a repetition means nothing, because the first time was counted: statistics whose step has
  // been sealed since (a step seals with everybody's), or that had been acknowledged.
  bool WasCounted(const ContributionId& id, const absl::Status& refusal) const;

  // The epoch has changed and with it open slots were dropped: statistics acknowledged in a step that may not have been
  // sealed count as unanswered again, and go first. Takes effect with the next StartStream.
  void Reopen();

  // All that are in it, in their order.
  std::vector<Item> Items() const;
  std::vector<Item> TakeExpired(absl::Time now);
  std::vector<Item> TakeAll();
  // Earliest time after `now` at which Next or TakeExpired may have something new to say; InfiniteFuture: never.
  absl::Time NextEvent(absl::Time now) const;

  size_t unacknowledged() const { return unacknowledged_; }
  bool empty() const { return entries_.empty(); }

 private:
  enum class State : uint8_t { kQueued, kSending, kSent, kParked, kAcknowledged };
  struct Entry {
    Item item;
    State state = State::kQueued;
    uint64_t sent_bytes = 0;
    absl::Time not_before = absl::InfinitePast();
    bool sent_before = false;          // whole, on an earlier stream
    bool acknowledged_before = false;  // in an earlier epoch
  };
  using Sequence = int64_t;

  Entry* FindEntry(const ContributionId& id);
  const Entry* FindEntry(const ContributionId& id) const;
  Item Erase(Sequence sequence);
  void Retain(const Item& item);
  // Moves an entry, keeping queue_, credit_used_ and unacknowledged_ right.
  void Move(Sequence sequence, Entry& entry, State to);
  std::optional<Sequence> Head(absl::Time now) const;
  static bool Unacknowledged(State state) { return state != State::kAcknowledged; }
  static bool UsesCredit(State state) { return state == State::kSending || state == State::kSent; }

  absl::Status AddAt(Sequence sequence, Item item);

  Sequence next_sequence_ = 0;
  Sequence first_sequence_ = 0;  // below it nothing has been used
  std::map<Sequence, Entry> entries_;
  absl::flat_hash_map<ContributionId, Sequence> by_id_;
  std::set<Sequence> queue_;         // queued entries
  std::optional<Sequence> sending_;  // the entry whose chunks are being written
  bool open_ = false;
  uint64_t credit_bytes_ = 0;
  uint64_t credit_used_ = 0;  // payload bytes of entries being sent or sent
  size_t unacknowledged_ = 0;
  // Per layer the last statistics acknowledged, until a result shows that their step was sealed.
  std::map<uint32_t, Item> retained_;
};

}  // namespace precondor
