// SPDX-License-Identifier: Apache-2.0
// Holds what a worker sends to one shard until it is answered: order, credit, acknowledgement and repetition, without
// I/O.
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
#include "proto/wire/tensor_codec.h"

namespace precondor {

// Holds contributions by their place in the sending order. A gradient is dropped when a gradient of the same layer is
// answered that this rank submitted after it had received the first answer. All ranks submit in the same order, so
// every rank has the first answer by then. Statistics are dropped together with their step's gradient, or after a few
// statistic steps if this rank sends no gradient for the layer. Not thread-safe.
class RetransmitBuffer {
 public:
  using Item = std::shared_ptr<const Contribution>;
  using Sequence = int64_t;

  // Keeps acknowledged statistics.
  void KeepStatistics(Sequence sequence, Item item);
  // Keeps an answered gradient. `next` is the sequence of the next submission. `item` owns its bytes and has no answer
  // outstanding.
  void KeepGradient(Sequence sequence, Item item, Sequence next);
  // Drops the contributions that no rank can need after this answer to a gradient.
  void OnAnswer(const ContributionId& id, Sequence sequence, Sequence next);
  // If the layer has a contribution of this kind for this step or a later one, the job has rolled back: drops the
  // layer's contributions of this step and later.
  void OnSubmit(const ContributionId& id);

  // The lowest step for which a gradient of the layer is held; nullopt if there is none.
  std::optional<uint64_t> FirstGradient(uint32_t layer) const;

  // Moves the contributions of some layers out, so that the buffer of another link can hold them.
  struct Taken {
    Item item;
    std::optional<Sequence> answered_at;
  };
  std::map<Sequence, Taken> TakeLayers(const std::set<uint32_t>& layers);
  void Put(Sequence sequence, Taken taken);

  const std::map<Sequence, Item>& items() const { return items_; }
  void Clear();

 private:
  struct Layer {
    // By item: sequence of the next submission when its step was answered. Nullopt: not known to be answered.
    std::map<Sequence, std::optional<Sequence>> answered_at;
  };
  void Erase(Layer& layer, Sequence sequence);

  std::map<Sequence, Item> items_;
  std::map<uint32_t, Layer> layers_;
};

// What to do about a contribution that a shard refused.
enum class Recovery : uint8_t {
  kRefused,       // final for this contribution
  kRetryLater,    // the shard is not ready for it: send it again after a pause
  kRefreshEpoch,  // the membership has changed: join again, then send it again
  kFatal,         // final for the worker
};
// Returns what to do about a refusal, from its ErrorReason and code.
Recovery RecoveryFor(const absl::Status& refusal);

// Decides what goes to one shard next, and what has to be sent again. An entry is queued -> being sent (one at a time,
// in order) -> sent -> acknowledged. Acknowledged statistics are then done; a gradient or pull waits for its RESULT. A
// fetch has a RESULT and no acknowledgement. Not thread-safe: the link's lock guards it.
class Outbox {
 public:
  using Item = std::shared_ptr<const Contribution>;

  // Adds a contribution at the end of the queue. Returns ALREADY_EXISTS if one with this id is not complete yet.
  absl::Status Add(Item item);

  // One frame to write, with `chunk` of the item's payload.
  struct Frame {
    Item item;
    wire::Chunk chunk;
  };
  // Returns the next frame and counts it as written. Returns nullopt if the queue is empty, its head has to wait, or
  // the credit does not suffice. A payload larger than the whole credit is sent when no other payload uses credit.
  // Everything waits for the acknowledgement of a RESUME. A shard that refuses the RESUME because it does not have the
  // session yet could otherwise take what follows it, and answer a step anew that this rank has had the answer of.
  std::optional<Frame> Next(absl::Time now);
  // Starts a new stream with this credit, on which all unanswered contributions are sent again, in order. Nothing is
  // sent without a stream. `shard_generation` is that of the CREDIT frame. If it is 0 or differs from the previous
  // stream's, the kept contributions are sent again too, each at its place, and before everything a RESUME for each
  // layer that has had an answer. Returns true in that case; false for the first stream.
  bool StartStream(uint64_t credit_bytes, uint64_t shard_generation = 0);
  // Records that first order has followed the steps before `step`, so that no RESUME claims their factors: a shard that
  // has lost them meanwhile has lost nothing that an answer needs. Not for workers that have the factors themselves.
  void ForgetVersionsBefore(uint64_t step);
  void StopStream();
  // Tells the shard that this process has taken its rank over and sends nothing for the layer before `step`. Sends a
  // RESUME before everything else, again to each other memory until the layer has had an answer. Without it the other
  // ranks would wait for contributions of this rank's earlier steps. `factor_version`: see WorkerOptions; 0: unknown.
  void BeginAt(uint32_t layer, uint64_t step, uint64_t factor_version = 0);
  // Records that the shard has told of updates that the layer's memory lacks, so that another memory does not again.
  void LowerBegun(uint32_t layer, uint64_t updates_lost);

  // The following functions take in answers. They return the contribution, or null if none is waiting (a late or
  // repeated answer).
  Item Acknowledge(const ContributionId& id);
  Item Find(const ContributionId& id) const;
  // Removes a gradient, pull or fetch whose result is complete. `kept`, if not null, is the contribution from
  // CopyToKeep, for later repetition; it is ignored if the shard keeps no memory. `factor_version` is that of the
  // result.
  Item Finish(const ContributionId& id, Item kept, uint64_t factor_version);
  // Returns a copy that owns its bytes and completes no caller's future.
  static Item CopyToKeep(const Contribution& item);
  // Whether answered gradients are kept: the shard restarts with its memory. A shard that loses its factors cannot
  // repeat an answer, so its gradients are not worth their memory. True before the first stream, when this is unknown.
  // Statistics are always kept.
  bool keeps_gradients() const { return shard_generation_ != 0 || !started_before_; }
  Item Remove(const ContributionId& id);
  // True if the outbox holds this contribution, and not a later one with its id.
  bool Holds(const Item& item) const { return Find(item->id) == item; }
  // Replaces `seen` by `item`, an equivalent contribution with the same id. Does nothing if the outbox does not hold
  // `seen`. Call between streams.
  void Replace(const Item& seen, Item item);
  // True if `refusal` is about the values (NON_FINITE, OVER_NORM). The shard counts it as this rank's abstention until
  // it loses its memory.
  bool CountsAsAbstention(const ContributionId& id, const absl::Status& refusal) const;
  // Replaces a contribution for which CountsAsAbstention holds by an abstention, which is acknowledged, answered and
  // kept as any contribution. A rank that went on without the answer would be ahead of what the other ranks know.
  // Returns the refused contribution.
  Item AbstainInstead(const ContributionId& id);
  // Sends the contribution again after `pause`. Each further refusal on the stream doubles the pause, up to 32 times
  // `pause`, so that a large gradient is not sent often to a shard that is not ready for it.
  void RetryAfter(const ContributionId& id, absl::Time now, absl::Duration pause);
  // Holds the contribution back until the next StartStream.
  void Park(const ContributionId& id);
  // Until `time` STEP_TOO_FAR_AHEAD is retried: the shard may have another memory, which does not know yet which steps
  // are over.
  void RetryRefusalsUntil(absl::Time time) { retry_refusals_until_ = time; }
  // RecoveryFor with what is known about this shard: it may be about to get the session (UNKNOWN_SESSION), or to
  // hold an old step open that other ranks have repeated (STEP_TOO_FAR_AHEAD). STATE_LOST of a RESUME or
  // a repetition does not end the worker: other ranks may wait for its gradients of other layers, and would not learn
  // of the loss.
  Recovery RecoveryOf(const ContributionId& id, const absl::Status& refusal, absl::Time now) const;
  // True if `refusal` of a repetition has no meaning because the first transmission counted: the contribution has been
  // answered, or these are statistics that were acknowledged, or whose step has been sealed since (a step is sealed
  // with those of all ranks).
  bool WasCounted(const ContributionId& id, const absl::Status& refusal) const;

  // Prepares for a new epoch, which has dropped the open slots: acknowledged statistics of a step that may not have
  // been sealed count as unanswered again and are sent first. Takes effect with the next StartStream.
  void Reopen();

  // Removes and returns all state of layers whose shard has another address, in order. Call between streams.
  struct Moved;
  Moved TakeLayers(const std::set<uint32_t>& layers);
  // Adds the state of layers that another outbox has given up, and sends it to this outbox's shard.
  void Adopt(Moved&& moved);
  // The highest step of any layer whose gradient has been answered; nullopt if there is none.
  std::optional<uint64_t> answered_through() const;

  // All contributions, in order.
  std::vector<Item> Items() const;
  std::vector<Item> TakeExpired(absl::Time now);
  std::vector<Item> TakeAll();
  // Earliest time from `now` on at which Next or TakeExpired may return something new; InfiniteFuture if never.
  absl::Time NextEvent(absl::Time now) const;

  size_t unacknowledged() const { return unacknowledged_; }
  // Whether a part of an entry's payload is written, and the rest is not.
  bool sending() const { return sending_.has_value(); }
  bool empty() const { return entries_.empty(); }

 private:
  enum class State : uint8_t { kQueued, kSending, kSent, kParked, kAcknowledged };
  struct Entry {
    Item item;
    State state = State::kQueued;
    uint64_t sent_bytes = 0;
    absl::Time not_before = absl::InfinitePast();
    int retries = 0;                   // on this stream
    bool sent_before = false;          // completely, on an earlier stream
    bool acknowledged_before = false;  // in an earlier epoch, or by the shard's earlier memory
    bool already_answered = false;     // this rank has the answer
  };
  using Sequence = int64_t;

  Entry* FindEntry(const ContributionId& id);
  const Entry* FindEntry(const ContributionId& id) const;
  Item Erase(Sequence sequence);
  void Retain(const Item& item);
  // Changes an entry's state and updates queue_, credit_used_ and unacknowledged_.
  void Move(Sequence sequence, Entry& entry, State to);
  std::optional<Sequence> Head(absl::Time now) const;
  static bool Unacknowledged(State state) { return state != State::kAcknowledged; }
  static bool UsesCredit(State state) { return state == State::kSending || state == State::kSent; }

  absl::Status AddAt(Sequence sequence, Item item);
  void SendKeptAgain();
  // Tells the shard's new memory which step of the layer was answered last, so that the shard drops steps that can no
  // longer be completed.
  void SendResume(uint32_t layer);
  void SendBegin(uint32_t layer);
  // Sends `resume` before everything else. Replaces an unacknowledged RESUME for the layer and step.
  void SendFirst(const std::shared_ptr<Contribution>& resume);
  // Sends a kept contribution again.
  void SendAgain(Sequence sequence, const Item& item);

  Sequence next_sequence_ = 0;
  Sequence first_sequence_ = 0;  // lowest sequence in use; smaller ones are sent first
  std::map<Sequence, Entry> entries_;
  absl::flat_hash_map<ContributionId, Sequence> by_id_;
  std::set<Sequence> queue_;         // queued entries
  std::optional<Sequence> sending_;  // the entry whose chunks are being written
  bool open_ = false;
  absl::Time retry_refusals_until_ = absl::InfinitePast();
  bool started_before_ = false;
  uint64_t shard_generation_ = 0;
  uint64_t credit_bytes_ = 0;
  uint64_t credit_used_ = 0;  // payload bytes of entries being sent or sent
  size_t resumes_sent_ = 0;   // RESUMEs that the shard has not acknowledged
  size_t unacknowledged_ = 0;
  // Last acknowledged statistics by layer, until a result shows that their step was sealed.
  std::map<uint32_t, Item> retained_;
  // Last answer to a gradient or pull by layer. Before the first one, the answer to a fetch.
  struct LastAnswer {
    uint64_t step = 0;
    uint64_t factor_version = 0;  // 0 in first order: no answer needs the factors of an earlier one
    Mode mode = Mode::kSecondOrder;
  };
  std::map<uint32_t, LastAnswer> answered_;
  struct Begun {
    uint64_t step = 0;
    uint64_t factor_version = 0;
  };
  std::map<uint32_t, Begun> begins_;  // by layer; see BeginAt
  RetransmitBuffer kept_;
};

// State of layers that move to another outbox.
struct Outbox::Moved {
  std::map<Sequence, Entry> entries;
  std::map<Sequence, RetransmitBuffer::Taken> kept;
  std::map<uint32_t, Item> retained;
  std::map<uint32_t, LastAnswer> answered;
  std::map<uint32_t, Begun> begins;
  Sequence first = 0;  // lowest sequence of entries and kept
  Sequence next = 0;   // sequence of the next submission in the old outbox
};

}  // namespace precondor
