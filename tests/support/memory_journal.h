// SPDX-License-Identifier: Apache-2.0
// A shard's journal that outlives the shard, in memory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/mutex.h"
#include "server/core/api/shard_journal.h"
#include "server/core/shard/shard.h"

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
  bool AppendGradient(const GradientRecord& record) override {
    MutexLock lock(mu_);
    if (keeps_gradients_) gradients_.push_back(record);
    return false;
  }
  void Keep(LayerImage image) override {
    MutexLock lock(mu_);
    const std::pair at(image.at.rollback_epoch, image.at.step);
    if (at != snapshot_at_) {
      snapshot_at_ = at;
      images_.clear();
      records_at_snapshot_ = records_.size();
    }
    images_[image.at.layer] = std::move(image);
    if (images_.size() < install_->install.layers.size()) return;
    snapshot_ = std::exchange(images_, {});
    snapshot_install_ = install_;
    records_.erase(records_.begin(), records_.begin() + static_cast<int64_t>(records_at_snapshot_));
    ++snapshots_;
  }

  void Restore(Shard& shard) const {
    MutexLock lock(mu_);
    if (snapshot_install_.has_value()) shard.replay().Add(*snapshot_install_);
    for (const auto& [layer, image] : snapshot_) shard.replay().Load(image);
    for (const ShardRecord& record : records_) shard.replay().Add(record);
    for (const GradientRecord& record : gradients_) shard.replay().Add(record);
  }
  std::vector<GradientRecord> gradients() const {
    MutexLock lock(mu_);
    return gradients_;
  }
  void Clear() {
    MutexLock lock(mu_);
    records_.clear();
    gradients_.clear();
    snapshot_.clear();
    images_.clear();
    snapshot_install_.reset();
    snapshot_at_ = {};
  }
  // Off: gradients are dropped, as by a journal without room for them.
  void set_keeps_gradients(bool keeps) {
    MutexLock lock(mu_);
    keeps_gradients_ = keeps;
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
  std::vector<GradientRecord> gradients_ ABSL_GUARDED_BY(mu_);
  bool keeps_gradients_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<InstallRecord> install_ ABSL_GUARDED_BY(mu_);
  int lose_next_ ABSL_GUARDED_BY(mu_) = 0;
  std::pair<uint64_t, uint64_t> snapshot_at_ ABSL_GUARDED_BY(mu_);  // rollback epoch, step
  size_t records_at_snapshot_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint32_t, LayerImage> images_ ABSL_GUARDED_BY(mu_);
  std::optional<InstallRecord> snapshot_install_ ABSL_GUARDED_BY(mu_);
  std::map<uint32_t, LayerImage> snapshot_ ABSL_GUARDED_BY(mu_);
  int64_t snapshots_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
