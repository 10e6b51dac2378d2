// SPDX-License-Identifier: Apache-2.0
// Repeats contributions that were acknowledged or answered: in another epoch, to a shard that has lost its memory, and
// to a shard that takes over layers.
#include <algorithm>
#include <utility>

#include "client/cpp/src/outbox.h"

namespace precondor {

void Outbox::DropBefore(uint64_t step) {
  kept_.DropBefore(step);
  std::erase_if(retained_, [step](const auto& of) { return of.second->id.step < step; });
  std::vector<Sequence> unneeded;
  for (const auto& [sequence, entry] : entries_) {
    const ContributionId& id = entry.item->id;
    if (entry.already_answered && id.step < step && id.kind != v1::FRAME_KIND_RESUME) unneeded.push_back(sequence);
  }
  for (const Sequence sequence : unneeded) Erase(sequence);
}

void Outbox::DropUnansweredBefore(uint64_t step) {
  if (working_on_ > step) DropBefore(step);
  std::set<uint32_t> dropped;
  for (auto& [layer, last] : answered_) {
    if (last.step >= step || last.factor_version == 0) continue;
    last.factor_version = 0;
    dropped.insert(layer);
  }
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

void Outbox::BeginAt(uint32_t layer, uint64_t step) {
  begins_[layer] = step;
  SendBegin(layer);
}

void Outbox::SendBegin(uint32_t layer) {
  if (answered_.contains(layer)) return;
  auto begin = std::make_shared<Contribution>();
  begin->id = {v1::FRAME_KIND_RESUME, begins_.at(layer), layer};
  begin->abstain = true;
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
  for (const auto& [layer, step] : moved.begins) BeginAt(layer, step);
}

}  // namespace precondor
