// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/outbox.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Statistic steps for which statistics are kept if no gradient's answer ends their use: more than any shard keeps open.
constexpr int64_t kStatisticSteps = 3;

}  // namespace

Recovery RecoveryFor(const absl::Status& refusal) {
  switch (GetErrorReason(refusal)) {
    case ErrorReason::kStaleEpoch:
      return Recovery::kRefreshEpoch;
    case ErrorReason::kFutureEpoch:
    case ErrorReason::kNotActive:
    case ErrorReason::kDraining:
    case ErrorReason::kCapacity:
      return Recovery::kRetryLater;
    case ErrorReason::kUnknownSession:
    case ErrorReason::kUnknownRank:
    case ErrorReason::kStaleIncarnation:
    case ErrorReason::kSpecMismatch:
    case ErrorReason::kNotOwner:
    case ErrorReason::kStateLost:
      return Recovery::kFatal;
    default:
      return refusal.code() == absl::StatusCode::kUnavailable ? Recovery::kRetryLater : Recovery::kRefused;
  }
}

absl::Status Outbox::Add(Item item) {
  const ContributionId id = item->id;
  if (const Entry* old = FindEntry(id); old != nullptr && old->already_answered) Erase(by_id_.at(id));
  PRECONDOR_RETURN_IF_ERROR(AddAt(next_sequence_, std::move(item)));
  kept_.OnSubmit(id);
  // The job has rolled back, so that the answer belongs to an undone step. A FETCH belongs to no step.
  const auto last = id.kind == v1::FRAME_KIND_FETCH ? answered_.end() : answered_.find(id.layer);
  if (last != answered_.end() && id.step <= last->second.step) {
    answered_.erase(last);
  }
  ++next_sequence_;
  return absl::OkStatus();
}

absl::Status Outbox::AddAt(Sequence sequence, Item item) {
  if (!by_id_.try_emplace(item->id, sequence).second) {
    return absl::AlreadyExistsError(
        absl::StrCat("step ", item->id.step, " layer ", item->id.layer, ": sent already and not yet answered"));
  }
  entries_[sequence].item = std::move(item);
  queue_.insert(sequence);
  ++unacknowledged_;
  return absl::OkStatus();
}

std::optional<Outbox::Sequence> Outbox::Head(absl::Time now) const {
  if (!open_) return std::nullopt;
  if (sending_.has_value()) return sending_;
  if (queue_.empty()) return std::nullopt;
  const Entry& head = entries_.at(*queue_.begin());
  if (head.not_before > now) return std::nullopt;
  if (resumes_sent_ > 0 && head.item->id.kind != v1::FRAME_KIND_RESUME) return std::nullopt;
  if (credit_used_ > 0 && credit_used_ + head.item->payload.size() > credit_bytes_) return std::nullopt;
  return *queue_.begin();
}

std::optional<Outbox::Frame> Outbox::Next(absl::Time now) {
  const std::optional<Sequence> head = Head(now);
  if (!head.has_value()) return std::nullopt;
  Entry& entry = entries_.at(*head);
  if (entry.state == State::kQueued) Move(*head, entry, State::kSending);
  const uint64_t total = entry.item->payload.size();
  Frame frame;
  frame.item = entry.item;
  frame.chunk = {entry.sent_bytes, std::min(wire::kChunkBytes, total - entry.sent_bytes)};
  entry.sent_bytes += frame.chunk.size;
  if (entry.sent_bytes == total) Move(*head, entry, State::kSent);
  return frame;
}

void Outbox::Move(Sequence sequence, Entry& entry, State to) {
  const State from = entry.state;
  if (from == State::kQueued) queue_.erase(sequence);
  if (to == State::kQueued) {
    queue_.insert(sequence);
    entry.sent_bytes = 0;
  }
  if (from == State::kSending) sending_.reset();
  if (to == State::kSending) sending_ = sequence;
  const uint64_t bytes = entry.item->payload.size();
  credit_used_ += (UsesCredit(to) ? bytes : 0) - (UsesCredit(from) ? bytes : 0);
  if (entry.item->id.kind == v1::FRAME_KIND_RESUME) {
    resumes_sent_ += (UsesCredit(to) ? 1 : 0) - (UsesCredit(from) ? 1 : 0);
  }
  unacknowledged_ += (Unacknowledged(to) ? 1 : 0) - (Unacknowledged(from) ? 1 : 0);
  entry.state = to;
}

bool Outbox::StartStream(uint64_t credit_bytes, uint64_t shard_generation) {
  StopStream();
  const bool other_generation =
      std::exchange(started_before_, true) && (shard_generation != shard_generation_ || shard_generation == 0);
  if (other_generation) {
    SendKeptAgain();
    for (const auto& [layer, last] : answered_) SendResume(layer);
    for (const auto& [layer, begin] : begins_) SendBegin(layer);
  }
  shard_generation_ = shard_generation;
  open_ = true;
  credit_bytes_ = credit_bytes;
  return other_generation;
}

void Outbox::StopStream() {
  open_ = false;
  for (auto& [sequence, entry] : entries_) {
    entry.retries = 0;
    if (entry.state == State::kSent || entry.state == State::kAcknowledged) entry.sent_before = true;
    if (entry.state != State::kQueued) Move(sequence, entry, State::kQueued);
  }
}

Outbox::Entry* Outbox::FindEntry(const ContributionId& id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &entries_.at(found->second);
}

const Outbox::Entry* Outbox::FindEntry(const ContributionId& id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &entries_.at(found->second);
}

Outbox::Item Outbox::Acknowledge(const ContributionId& id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  Entry& entry = entries_.at(found->second);
  if (entry.state != State::kSent) return nullptr;
  // This rank has the answer already, and does not wait for another one.
  if (entry.already_answered) return Erase(found->second);
  if (HasResult(id.kind)) {
    Move(found->second, entry, State::kAcknowledged);
    return entry.item;
  }
  Retain(entry.item);
  kept_.KeepStatistics(found->second, CopyToKeep(*entry.item));
  return Erase(found->second);
}

Outbox::Item Outbox::Find(const ContributionId& id) const {
  const Entry* entry = FindEntry(id);
  return entry == nullptr ? nullptr : entry->item;
}

Outbox::Item Outbox::Erase(Sequence sequence) {
  const auto found = entries_.find(sequence);
  // Moves it to the acknowledged state first, which uses neither queue nor credit.
  Move(sequence, found->second, State::kAcknowledged);
  Item item = std::move(found->second.item);
  entries_.erase(found);
  by_id_.erase(item->id);
  return item;
}

Outbox::Item Outbox::Finish(const ContributionId& id, Item kept, uint64_t factor_version) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  if (!SealsAnswer(id.kind)) {
    // The fetched factors contain all earlier steps, which a RESUME tells to a new memory.
    if (id.step > 0) answered_.try_emplace(id.layer, LastAnswer{.step = id.step - 1, .factor_version = factor_version});
    return Erase(found->second);
  }
  const Sequence sequence = found->second;
  kept_.OnAnswer(id, sequence, next_sequence_);
  if (kept != nullptr && keeps_gradients()) kept_.KeepGradient(sequence, std::move(kept), next_sequence_);
  Item item = Remove(id);
  LastAnswer& last = answered_[id.layer];
  if (last.step == id.step) last.factor_version = item->mode == Mode::kSecondOrder ? factor_version : 0;
  return item;
}

Outbox::Item Outbox::Remove(const ContributionId& id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  const Entry& entry = entries_.at(found->second);
  const bool may_have_counted = !entry.already_answered && (entry.acknowledged_before || entry.sent_before);
  Item item = Erase(found->second);
  // The step is over, unless the job rolls back to this very step.
  if (id.kind == v1::FRAME_KIND_STATISTICS && may_have_counted) Retain(item);
  if (SealsAnswer(id.kind)) {
    const auto kept = retained_.find(id.layer);
    if (kept != retained_.end() && kept->second->id.step <= id.step) retained_.erase(kept);
    LastAnswer& last = answered_[id.layer];
    if (last.step <= id.step) {
      last.step = id.step;
      last.mode = item->mode;
    }
  }
  return item;
}

void Outbox::Replace(const Item& seen, Item item) {
  Entry* entry = FindEntry(seen->id);
  if (entry != nullptr && entry->item == seen) entry->item = std::move(item);
}

bool Outbox::CountsAsAbstention(const ContributionId& id, const absl::Status& refusal) const {
  const Entry* entry = FindEntry(id);
  const ErrorReason reason = GetErrorReason(refusal);
  const bool values = reason == ErrorReason::kNonFinite || reason == ErrorReason::kOverNorm;
  return entry != nullptr && values && !entry->item->abstain && !WasCounted(id, refusal);
}

Outbox::Item Outbox::AbstainInstead(const ContributionId& id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  Entry& entry = entries_.at(found->second);
  if (entry.state != State::kQueued) Move(found->second, entry, State::kQueued);
  auto abstention = std::make_shared<Contribution>();
  abstention->id = id;
  abstention->mode = entry.item->mode;
  abstention->abstain = true;
  abstention->result = entry.item->result;
  abstention->deadline = entry.item->deadline;
  return std::exchange(entry.item, std::move(abstention));
}

void Outbox::RetryAfter(const ContributionId& id, absl::Time now, absl::Duration pause) {
  constexpr int kMostDoublings = 5;
  Entry* entry = FindEntry(id);
  if (entry == nullptr) return;
  entry->not_before = now + pause * (1 << std::min(entry->retries++, kMostDoublings));
  if (entry->state != State::kQueued) Move(by_id_.at(id), *entry, State::kQueued);
}

void Outbox::Park(const ContributionId& id) {
  Entry* entry = FindEntry(id);
  if (entry != nullptr) Move(by_id_.at(id), *entry, State::kParked);
}

Recovery Outbox::RecoveryOf(const ContributionId& id, const absl::Status& refusal, absl::Time now) const {
  switch (GetErrorReason(refusal)) {
    case ErrorReason::kStateLost: {
      const Entry* const entry = FindEntry(id);
      return entry != nullptr && entry->already_answered ? Recovery::kRefused : Recovery::kFatal;
    }
    case ErrorReason::kUnknownSession:
      return Recovery::kRetryLater;
    case ErrorReason::kStepTooFarAhead:
      return now < retry_refusals_until_ ? Recovery::kRetryLater : Recovery::kRefused;
    default:
      return RecoveryFor(refusal);
  }
}

bool Outbox::WasCounted(const ContributionId& id, const absl::Status& refusal) const {
  const Entry* entry = FindEntry(id);
  if (entry == nullptr) return false;
  if (entry->already_answered) return true;
  if (id.kind != v1::FRAME_KIND_STATISTICS) return false;
  const bool over = GetErrorReason(refusal) == ErrorReason::kStaleStep;
  return entry->acknowledged_before || (over && entry->sent_before);
}

std::optional<uint64_t> Outbox::answered_through() const {
  std::optional<uint64_t> highest;
  for (const auto& [layer, last] : answered_) highest = std::max(highest.value_or(0), last.step);
  return highest;
}

std::vector<Outbox::Item> Outbox::Items() const {
  std::vector<Item> items;
  items.reserve(entries_.size());
  for (const auto& [sequence, entry] : entries_) items.push_back(entry.item);
  return items;
}

std::vector<Outbox::Item> Outbox::TakeExpired(absl::Time now) {
  std::vector<Sequence> expired;
  for (const auto& [sequence, entry] : entries_) {
    if (entry.item->deadline <= now) expired.push_back(sequence);
  }
  std::vector<Item> items;
  items.reserve(expired.size());
  for (const Sequence sequence : expired) items.push_back(Erase(sequence));
  return items;
}

std::vector<Outbox::Item> Outbox::TakeAll() {
  std::vector<Item> items;
  while (!entries_.empty()) items.push_back(Erase(entries_.begin()->first));
  retained_.clear();
  kept_.Clear();
  return items;
}

absl::Time Outbox::NextEvent(absl::Time now) const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [sequence, entry] : entries_) next = std::min(next, entry.item->deadline);
  if (open_ && !queue_.empty()) {
    const absl::Time not_before = entries_.at(*queue_.begin()).not_before;
    if (not_before > now) next = std::min(next, not_before);
  }
  return std::max(next, now);
}

void Outbox::ForgetVersionsBefore(uint64_t step) {
  std::set<uint32_t> dropped;
  const auto drop = [&](auto& last_by_layer) {
    for (auto& [layer, last] : last_by_layer) {
      if (last.step >= step || last.factor_version == 0) continue;
      last.factor_version = 0;
      dropped.insert(layer);
    }
  };
  drop(answered_);
  drop(begins_);
  if (dropped.empty()) return;
  for (auto& [sequence, entry] : entries_) {
    if (entry.item->id.kind != v1::FRAME_KIND_RESUME || !dropped.contains(entry.item->id.layer)) continue;
    auto without = std::make_shared<Contribution>(*entry.item);
    without->factor_version = 0;
    entry.item = std::move(without);
  }
}

void Outbox::SendKeptAgain() {
  for (const auto& [sequence, item] : kept_.items()) SendAgain(sequence, item);
}

void Outbox::SendResume(uint32_t layer) {
  const LastAnswer& last = answered_.at(layer);
  auto resume = std::make_shared<Contribution>();
  const uint64_t next = last.step + 1;
  resume->id = {v1::FRAME_KIND_RESUME, std::min(kept_.FirstGradient(layer).value_or(next), next), layer};
  resume->mode = last.mode;
  resume->factor_version = last.factor_version;
  resume->next_step = next;
  SendFirst(resume);
}

void Outbox::BeginAt(uint32_t layer, uint64_t step, uint64_t factor_version) {
  begins_[layer] = {step, factor_version};
  SendBegin(layer);
}

void Outbox::LowerBegun(uint32_t layer, uint64_t updates_lost) {
  const auto found = begins_.find(layer);
  if (found != begins_.end()) found->second.factor_version -= std::min(found->second.factor_version, updates_lost);
}

void Outbox::SendBegin(uint32_t layer) {
  if (answered_.contains(layer)) return;
  auto begin = std::make_shared<Contribution>();
  begin->id = {v1::FRAME_KIND_RESUME, begins_.at(layer).step, layer};
  begin->abstain = true;
  begin->factor_version = begins_.at(layer).factor_version;
  SendFirst(begin);
}

void Outbox::SendFirst(const std::shared_ptr<Contribution>& resume) {
  if (Entry* const on_its_way = FindEntry(resume->id); on_its_way != nullptr) {
    on_its_way->item = resume;
    return;
  }
  const Sequence sequence = first_sequence_ - 1;
  if (!AddAt(sequence, resume).ok()) return;
  first_sequence_ = sequence;
  entries_.at(sequence).already_answered = true;
}

void Outbox::SendAgain(Sequence sequence, const Item& item) {
  if (!AddAt(sequence, item).ok()) return;  // unanswered, and queued already
  Entry& entry = entries_.at(sequence);
  entry.sent_before = entry.acknowledged_before = entry.already_answered = true;
}

Outbox::Item Outbox::CopyToKeep(const Contribution& item) {
  auto kept = std::make_shared<Contribution>(item);
  kept->result = nullptr;
  kept->deadline = absl::InfiniteFuture();
  if (item.borrowed) {
    const auto bytes = std::make_shared<const std::vector<uint8_t>>(item.payload.begin(), item.payload.end());
    kept->payload = *bytes;
    kept->payload_owner = bytes;
    kept->borrowed = false;
  }
  return kept;
}

void Outbox::Retain(const Item& item) {
  Item& kept = retained_[item->id.layer];
  if (kept == nullptr || kept->id.step <= item->id.step) kept = item;
}

void Outbox::Reopen() {
  std::erase_if(retained_, [this](const auto& of) {
    const Item& item = of.second;
    if (AddAt(first_sequence_ - 1, item).ok()) {
      --first_sequence_;
      FindEntry(item->id)->acknowledged_before = true;
      return true;
    }
    // The caller has submitted it again, or it is being repeated for the other ranks, which does not retain it.
    return !FindEntry(item->id)->already_answered;
  });
}

Outbox::Moved Outbox::TakeLayers(const std::set<uint32_t>& layers) {
  Moved moved;
  for (auto it = entries_.begin(); it != entries_.end();) {
    const Sequence sequence = it->first;
    Entry entry = it->second;
    ++it;
    if (!layers.contains(entry.item->id.layer)) continue;
    Erase(sequence);
    moved.entries.emplace(sequence, std::move(entry));
  }
  for (const uint32_t layer : layers) {
    if (auto retained = retained_.extract(layer)) moved.retained.insert(std::move(retained));
    if (auto answered = answered_.extract(layer)) moved.answered.insert(std::move(answered));
    if (auto begins = begins_.extract(layer)) moved.begins.insert(std::move(begins));
  }
  moved.kept = kept_.TakeLayers(layers);
  moved.first = moved.next = next_sequence_;
  if (!moved.entries.empty()) moved.first = std::min(moved.first, moved.entries.begin()->first);
  if (!moved.kept.empty()) moved.first = std::min(moved.first, moved.kept.begin()->first);
  return moved;
}

void Outbox::Adopt(Moved&& moved) {
  const Sequence shift = next_sequence_ - moved.first;
  next_sequence_ = moved.next + shift;
  for (auto& [sequence, entry] : moved.entries) {
    if (!AddAt(sequence + shift, entry.item).ok()) continue;
    Entry& added = entries_.at(sequence + shift);
    added.sent_before = entry.sent_before;
    added.acknowledged_before = entry.acknowledged_before;
    added.already_answered = entry.already_answered;
  }
  for (auto& [sequence, taken] : moved.kept) {
    const Item item = taken.item;
    if (taken.answered_at.has_value()) taken.answered_at = *taken.answered_at + shift;
    kept_.Put(sequence + shift, std::move(taken));
    SendAgain(sequence + shift, item);
  }
  retained_.merge(moved.retained);
  for (const auto& [layer, last] : moved.answered) {
    answered_[layer] = last;
    SendResume(layer);
  }
  for (const auto& [layer, begin] : moved.begins) BeginAt(layer, begin.step, begin.factor_version);
}

void RetransmitBuffer::Erase(Layer& layer, Sequence sequence) {
  layer.answered_at.erase(sequence);
  items_.erase(sequence);
}

void RetransmitBuffer::KeepStatistics(Sequence sequence, Item item) {
  Layer& layer = layers_[item->id.layer];
  items_[sequence] = std::move(item);
  layer.answered_at.try_emplace(sequence, std::nullopt);
  int64_t unanswered = 0;
  for (auto it = layer.answered_at.rbegin(); it != layer.answered_at.rend(); ++it) {
    if (it->second.has_value() || ++unanswered <= kStatisticSteps) continue;
    Erase(layer, it->first);
    return;  // KeepStatistics adds one, so at most one is dropped
  }
}

void RetransmitBuffer::KeepGradient(Sequence sequence, Item item, Sequence next) {
  Layer& layer = layers_[item->id.layer];
  items_[sequence] = std::move(item);
  layer.answered_at[sequence] = next;
}

void RetransmitBuffer::OnAnswer(const ContributionId& id, Sequence sequence, Sequence next) {
  const auto found = layers_.find(id.layer);
  if (found == layers_.end()) return;
  Layer& layer = found->second;
  for (auto it = layer.answered_at.begin(); it != layer.answered_at.end();) {
    auto& [kept, answered_at] = *it++;
    const ContributionId& of = items_.at(kept)->id;
    if (answered_at.has_value() && *answered_at <= sequence) {
      Erase(layer, kept);
    } else if (!answered_at.has_value() && of.step <= id.step) {
      answered_at = next;
    }
  }
}

void RetransmitBuffer::OnSubmit(const ContributionId& id) {
  const auto found = layers_.find(id.layer);
  if (found == layers_.end()) return;
  Layer& layer = found->second;
  const auto back = [&](const auto& kept) {
    const ContributionId& of = items_.at(kept.first)->id;
    return of.kind == id.kind && of.step >= id.step;
  };
  if (std::none_of(layer.answered_at.begin(), layer.answered_at.end(), back)) return;
  for (auto it = layer.answered_at.begin(); it != layer.answered_at.end();) {
    const Sequence kept = (it++)->first;
    if (items_.at(kept)->id.step >= id.step) Erase(layer, kept);
  }
}

std::optional<uint64_t> RetransmitBuffer::FirstGradient(uint32_t layer) const {
  const auto found = layers_.find(layer);
  if (found == layers_.end()) return std::nullopt;
  std::optional<uint64_t> first;
  for (const auto& [sequence, answered_at] : found->second.answered_at) {
    const ContributionId& of = items_.at(sequence)->id;
    if (SealsAnswer(of.kind)) first = std::min(first.value_or(of.step), of.step);
  }
  return first;
}

std::map<RetransmitBuffer::Sequence, RetransmitBuffer::Taken> RetransmitBuffer::TakeLayers(
    const std::set<uint32_t>& layers) {
  std::map<Sequence, Taken> taken;
  for (const uint32_t layer : layers) {
    const auto found = layers_.find(layer);
    if (found == layers_.end()) continue;
    for (const auto& [sequence, answered_at] : found->second.answered_at) {
      const auto item = items_.find(sequence);
      taken[sequence] = {std::move(item->second), answered_at};
      items_.erase(item);
    }
    layers_.erase(found);
  }
  return taken;
}

void RetransmitBuffer::Put(Sequence sequence, Taken taken) {
  layers_[taken.item->id.layer].answered_at[sequence] = taken.answered_at;
  items_[sequence] = std::move(taken.item);
}

void RetransmitBuffer::Clear() {
  items_.clear();
  layers_.clear();
}

}  // namespace precondor
