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

#include "client/cpp/src/contribution.h"
#include "client/cpp/src/retransmit_buffer.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

// What to do about a contribution that a shard refused.
enum class Recovery : uint8_t {
  kRefused,       // final for this contribution
  kRetryLater,    // the shard is not ready for it: send it again after a pause
  kRefreshEpoch,  // the membership has changed: join again, then send it again
  kFatal,         // final for the worker
};
Recovery RecoveryFor(const absl::Status& refusal);

// Life of an entry: queued -> being sent (one at a time, in order) -> sent -> acknowledged; statistics are then done, a
// gradient or pull waits for its result. A fetch has a result and no acknowledgement. A gradient that goes elsewhere
// has none of this, and is done with its result too. One thread at a time (its link's lock).
class Outbox {
 public:
  using Item = std::shared_ptr<const Contribution>;

  // `may_lose_shard`: what may be needed again is kept whatever the shard remembers, for another shard.
  explicit Outbox(bool may_lose_shard = false) : may_lose_shard_(may_lose_shard) {}

  // Takes it in at the end of the queue. AlreadyExists when one with this id is not yet done. `elsewhere`: it goes
  // another way than the stream, and has its place in the queue for ToStream.
  absl::Status Add(Item item, bool elsewhere = false);
  // Sends one that was to go elsewhere; nothing for any other.
  void ToStream(const ContributionId& id);

  // One frame to write: `chunk` of the item's payload.
  struct Frame {
    Item item;
    wire::Chunk chunk;
  };
  // The next frame, marked as written; nothing when the queue is empty, its head waits for its time, or the credit does
  // not allow it. A payload larger than all of the credit goes alone.
  std::optional<Frame> Next(absl::Time now);
  // A new stream with this credit: everything unanswered goes out again, in its order. Without one nothing does.
  // `shard_generation` as in the CREDIT frame: another one than before, and what is kept goes out again too, in its
  // place, and ahead of everything a RESUME for each layer that has been answered. True when there was a stream before,
  // and the memory may be another.
  bool StartStream(uint64_t credit_bytes, uint64_t shard_generation = 0);
  // Shards have dropped the factors of steps before this one: no RESUME claims them. Once this rank works on a later
  // step, all ranks do, and nothing of the earlier ones is sent again for the others' sake: it would go into factors
  // that came after.
  void DropUnansweredBefore(uint64_t step);
  void StopStream();
  // This process has taken its rank over, and sends nothing of the layer to steps before `step`. Says so by a RESUME
  // ahead of all else, again to each other memory until the layer has had an answer: where a rank's first steps send
  // nothing, the others would wait for what it never sends.
  void BeginAt(uint32_t layer, uint64_t step);

  // Answers. Each returns the item it was about; null for one that is not waited for (a late or repeated answer).
  Item Acknowledge(const ContributionId& id);
  Item Find(const ContributionId& id) const;
  // The result of the gradient, pull or fetch is there: removes it. `kept`, if not null, is the same contribution for
  // the case that it is needed again (Kept); ignored when the shard remembers nothing. `factor_version` as in the
  // result.
  Item Finish(const ContributionId& id, Item kept, uint64_t factor_version);
  // The contribution with bytes of its own and without a caller that waits for its result.
  static Item Kept(const Contribution& item);
  // Whether the shard comes back with what it knew, or another takes its place, so that gradients are worth their
  // memory: without the factors they were answered with, others cannot get the same answers. Before the first stream
  // that is unknown. Statistics are always kept.
  bool keeps_gradients() const { return shard_generation_ != 0 || may_lose_shard_ || !started_before_; }
  Item Remove(const ContributionId& id);
  // Whether it is still there, and not another of its id that came after it.
  bool Holds(const Item& item) const { return Find(item->id) == item; }
  // Sends `item`, which has the id of `seen` and means the same, in its place. Between streams; nothing unless it
  // holds `seen`.
  void Replace(const Item& seen, Item item);
  // True when `refusal` is about the values, which counts as this rank's abstention until the shard loses its memory.
  bool CountsAsAbstention(const ContributionId& id, const absl::Status& refusal) const;
  // Then: sends an abstention in its place, which is acknowledged, answered and kept as anything else. A rank that went
  // on without the answer would be ahead of what the others know. Returns what was refused.
  Item AbstainInstead(const ContributionId& id);
  // Sends it again after `pause`. Each further refusal on the same stream doubles the pause, up to 32 times `pause`: a
  // shard that is not ready for a large gradient does not receive all of it again and again.
  void RetryAfter(const ContributionId& id, absl::Time now, absl::Duration pause);
  // Keeps it until the next StartStream.
  void Park(const ContributionId& id);
  // Until then the shard may have another memory, which does not know yet which steps are over: a refusal is retried.
  void RetryRefusalsUntil(absl::Time time) { retry_refusals_until_ = time; }
  // RecoveryFor, of a refusal by this shard: it may be about to get the session again, or be rid of the layer, or hold
  // an old step open that others have sent again.
  Recovery RecoveryOf(const absl::Status& refusal, absl::Time now) const;
  // True when `refusal` of a repetition means nothing, because the first time was counted: statistics whose step has
  // been sealed since (a step seals with those of all ranks), or that had been acknowledged.
  bool WasCounted(const ContributionId& id, const absl::Status& refusal) const;

  // The epoch has changed and with it open slots were dropped: statistics acknowledged in a step that may not have been
  // sealed count as unanswered again, and go first. Takes effect with the next StartStream.
  void Reopen();

  // Layers go to another shard: what there is of them, in its order. Between streams.
  struct Moved;
  Moved TakeLayers(const std::set<uint32_t>& layers);
  // Sends it to this one's shard, which knows nothing of it.
  void Adopt(Moved&& moved);
  // The highest step whose gradient has been answered, in any layer; nullopt: none.
  std::optional<uint64_t> answered_through() const;

  // All that go by the stream, in their order.
  std::vector<Item> Items() const;
  std::vector<Item> TakeExpired(absl::Time now);
  std::vector<Item> TakeAll();
  // Earliest time after `now` at which Next or TakeExpired may have something new to say; InfiniteFuture: never.
  absl::Time NextEvent(absl::Time now) const;

  size_t unacknowledged() const { return unacknowledged_; }
  bool empty() const { return entries_.empty(); }

 private:
  enum class State : uint8_t { kQueued, kSending, kSent, kParked, kAcknowledged, kOnCollective };
  struct Entry {
    Item item;
    State state = State::kQueued;
    uint64_t sent_bytes = 0;
    absl::Time not_before = absl::InfinitePast();
    int retries = 0;                   // on this stream
    bool sent_before = false;          // whole, on an earlier stream
    bool acknowledged_before = false;  // in an earlier epoch, or by the shard before it was lost
    bool already_answered = false;     // its own answer has come
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
  void DropBefore(uint64_t step);
  void SendKeptAgain();
  // Tells the shard's new memory what the former one has answered: what it cannot complete is to hold nothing up.
  void SendResume(uint32_t layer);
  void SendBegin(uint32_t layer);
  // Ahead of everything; in the place of one for the same step that is on its way.
  void SendFirst(const std::shared_ptr<Contribution>& resume);
  // What is kept and has been acknowledged elsewhere, or before.
  void SendAgain(Sequence sequence, const Item& item);

  const bool may_lose_shard_;
  Sequence next_sequence_ = 0;
  Sequence first_sequence_ = 0;  // below it nothing has been used
  std::map<Sequence, Entry> entries_;
  absl::flat_hash_map<ContributionId, Sequence> by_id_;
  std::set<Sequence> queue_;         // queued entries
  std::optional<Sequence> sending_;  // the entry whose chunks are being written
  bool open_ = false;
  absl::Time retry_refusals_until_ = absl::InfinitePast();
  bool started_before_ = false;
  uint64_t shard_generation_ = 0;
  uint64_t working_on_ = 0;  // the step of the last Add
  uint64_t credit_bytes_ = 0;
  uint64_t credit_used_ = 0;  // payload bytes of entries being sent or sent
  size_t unacknowledged_ = 0;
  // Per layer the last statistics acknowledged, until a result shows that their step was sealed.
  std::map<uint32_t, Item> retained_;
  // Per layer the last answer to a gradient or pull; before the first, what a fetch has told.
  struct LastAnswer {
    uint64_t step = 0;
    uint64_t factor_version = 0;  // 0 in first order, where factors may be given up
    Mode mode = Mode::kSecondOrder;
  };
  std::map<uint32_t, LastAnswer> answered_;
  std::map<uint32_t, uint64_t> begins_;  // see BeginAt, by layer
  RetransmitBuffer kept_;
};

struct Outbox::Moved {
  std::map<Sequence, Entry> entries;
  std::map<Sequence, RetransmitBuffer::Taken> kept;
  std::map<uint32_t, LastAnswer> answered;
  std::map<uint32_t, uint64_t> begins;
  Sequence first = 0;  // of both
  Sequence next = 0;   // of what would have followed
};

}  // namespace precondor
