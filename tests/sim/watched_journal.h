// SPDX-License-Identifier: Apache-2.0
// A shard's journal with somebody who sees what factors layers take over from other shards.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "server/core/shard_journal.h"

namespace precondor::sim {

class WatchedJournal final : public ShardJournal {
 public:
  // `adopted`: as LayerState::Save gave them, where they came from another shard.
  using Watcher = std::function<void(const FactorsRecord& record, const std::optional<std::string>& adopted)>;
  WatchedJournal(ShardJournal& journal, Watcher watcher) : journal_(journal), watcher_(std::move(watcher)) {}

  void Append(const ShardRecord& record) override {
    journal_.Append(record);
    const auto* factors = std::get_if<FactorsRecord>(&record);
    if (factors == nullptr) return;
    const auto adopted = adopted_.find({factors->release, factors->at.layer});
    watcher_(*factors, adopted == adopted_.end() ? std::nullopt : std::optional(adopted->second));
  }
  void AdoptFactors(ReleasedFactors factors, std::function<void(absl::Status)> done) override {
    for (const auto& [layer, state] : factors.states) adopted_[{factors.release, layer}] = state;
    journal_.AdoptFactors(std::move(factors), std::move(done));
  }

  void Sync() override { journal_.Sync(); }
  void Keep(LayerImage image) override { journal_.Keep(std::move(image)); }
  void KeepFactors(ReleasedFactors factors) override { journal_.KeepFactors(std::move(factors)); }
  bool FactorsKept(uint64_t session_id, uint64_t release) override { return journal_.FactorsKept(session_id, release); }
  absl::StatusOr<std::string> ReadFactors(uint64_t session_id, uint64_t release, uint32_t layer) override {
    return journal_.ReadFactors(session_id, release, layer);
  }
  void Expect(const SnapshotOrder& order) override { journal_.Expect(order); }
  absl::StatusOr<std::optional<SnapshotProgress>> ProgressOf(const SnapshotOrder& order) override {
    return journal_.ProgressOf(order);
  }

 private:
  ShardJournal& journal_;
  const Watcher watcher_;
  std::map<std::pair<uint64_t, uint32_t>, std::string> adopted_;  // by release and layer
};

}  // namespace precondor::sim
