// SPDX-License-Identifier: Apache-2.0
// A shard's journal that outlives the shard, in memory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/base/mutex.h"
#include "server/core/shard.h"
#include "server/core/shard_journal.h"

namespace precondor {

// Thread-safe. Keeps the newest complete snapshot of its one session and the records since its first image.
class MemoryJournal final : public ShardJournal {
 public:
  void Append(const ShardRecord& record) override {
    MutexLock lock(mu_);
    if (lose_next_ > 0) {
      --lose_next_;
      return;
    }
    if (const auto* install = std::get_if<InstallRecord>(&record)) install_ = *install;
    records_.push_back(record);
  }
  void Keep(LayerImage image) override {
    MutexLock lock(mu_);
    if (image.at.step != cut_) {
      cut_ = image.at.step;
      images_.clear();
      records_at_cut_ = records_.size();
    }
    images_[image.at.layer] = std::move(image);
    if (images_.size() < install_->install.layers.size()) return;
    snapshot_ = std::exchange(images_, {});
    snapshot_install_ = install_;
    records_.erase(records_.begin(), records_.begin() + static_cast<int64_t>(records_at_cut_));
    ++snapshots_;
  }

  void Restore(Shard& shard) const {
    MutexLock lock(mu_);
    if (snapshot_install_.has_value()) shard.Replay(*snapshot_install_);
    for (const auto& [layer, image] : snapshot_) shard.Replay(image);
    for (const ShardRecord& record : records_) shard.Replay(record);
  }

  void LoseNext(int count) {
    MutexLock lock(mu_);
    lose_next_ = count;
  }
  int64_t snapshots() const {
    MutexLock lock(mu_);
    return snapshots_;
  }
  template <typename Record>
  std::vector<Record> Of() const {
    MutexLock lock(mu_);
    std::vector<Record> found;
    for (const ShardRecord& record : records_) {
      if (const auto* one = std::get_if<Record>(&record)) found.push_back(*one);
    }
    return found;
  }

 private:
  mutable Mutex mu_;
  std::vector<ShardRecord> records_ ABSL_GUARDED_BY(mu_);
  std::optional<InstallRecord> install_ ABSL_GUARDED_BY(mu_);
  int lose_next_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t cut_ ABSL_GUARDED_BY(mu_) = 0;
  size_t records_at_cut_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint32_t, LayerImage> images_ ABSL_GUARDED_BY(mu_);
  std::optional<InstallRecord> snapshot_install_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, LayerImage> snapshot_ ABSL_GUARDED_BY(mu_);
  int64_t snapshots_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
