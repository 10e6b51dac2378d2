// SPDX-License-Identifier: Apache-2.0
// Journals in memory, of shards that are gone, as those that take their layers over see them.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/core/peer_factors.h"
#include "server/core/peer_replay.h"
#include "tests/support/memory_journal.h"

namespace precondor {

// One thread. Jobs wait until somebody calls Work.
class MemoryPeers final : public PeerFactors {
 public:
  // Found in this order. `reading`: what reading it comes to.
  void Add(std::shared_ptr<MemoryJournal> journal, absl::Status reading = absl::OkStatus()) {
    journals_.emplace_back(std::move(journal), std::move(reading));
  }
  // False: there was nothing to do.
  bool Work() {
    if (jobs_.empty()) return false;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    job();
    return true;
  }
  void WorkAll() {
    while (Work()) {
    }
  }

  void Post(std::function<void()> job) override { jobs_.push_back(std::move(job)); }
  bool stopping() const override { return false; }
  std::vector<std::unique_ptr<PeerJournal>> Find(uint64_t session_id, const std::set<uint32_t>&) override {
    std::vector<std::unique_ptr<PeerJournal>> found;
    for (const auto& [journal, reading] : journals_) {
      found.push_back(std::make_unique<Peer>(session_id, journal, reading));
    }
    return found;
  }

 private:
  class Peer final : public PeerJournal {
   public:
    Peer(uint64_t session_id, std::shared_ptr<MemoryJournal> journal, absl::Status reading)
        : session_id_(session_id), journal_(std::move(journal)), reading_(std::move(reading)) {}
    const std::string& name() const override { return name_; }
    absl::Status Read(PeerReplay& into) override {
      journal_->Restore(
          [&](const InstallRecord& install, const LayerImage& image) { into.Add(install.install, image); },
          [&](const ShardRecord& record) { into.Add(record); });
      return reading_;
    }
    absl::StatusOr<std::string> ReadFactors(uint64_t release, uint32_t layer) override {
      return journal_->ReadFactors(session_id_, release, layer);
    }

   private:
    const std::string name_ = "memory";
    const uint64_t session_id_;
    const std::shared_ptr<MemoryJournal> journal_;
    const absl::Status reading_;
  };

  std::vector<std::pair<std::shared_ptr<MemoryJournal>, absl::Status>> journals_;
  std::deque<std::function<void()>> jobs_;
};

}  // namespace precondor
