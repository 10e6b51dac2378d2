// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/retransmit_buffer.h"

#include <algorithm>
#include <utility>

namespace precondor {
namespace {

// Statistic steps for which statistics are kept if no gradient's answer ends their use: more than any shard keeps open.
constexpr int64_t kStatisticSteps = 3;

}  // namespace

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

void RetransmitBuffer::DropBefore(uint64_t step) {
  for (auto& [number, layer] : layers_) {
    for (auto it = layer.answered_at.begin(); it != layer.answered_at.end();) {
      const Sequence kept = (it++)->first;
      if (items_.at(kept)->id.step < step) Erase(layer, kept);
    }
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
