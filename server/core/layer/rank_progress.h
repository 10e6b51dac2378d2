// SPDX-License-Identifier: Apache-2.0
// What a layer knows about the progress of each rank, besides the contributions of the window's steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/core/api/shard_control.h"

namespace precondor {

// Keeps for each rank of the session where its process begins or resumed, and whether it must begin again. A value
// type; not thread-safe.
class RankProgress {
 public:
  explicit RankProgress(int64_t world_size) : ranks_(static_cast<size_t>(world_size)) {}

  // Notes that the rank has sent something to this shard generation. Returns true for the first time.
  bool MarkHeard(uint32_t rank);

  // Notes that another process holds the rank, or that this shard generation begins in an epoch of which `member` is a
  // member and does not know what it sent to the generation before. `holds_factors` says that the process holds
  // factors, which it fetched from the shard.
  void Replace(const Member& member, bool holds_factors);
  // Calls `use(rank)` for each rank that has begun after `step`, and so sends nothing to it. Leaves out ranks that have
  // yet to begin, because they may still be told to begin earlier.
  template <typename Use>
  void ForEachThatBeganAfter(uint64_t step, const Use& use) const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].first_step > step && !ranks_[rank].yet_to_begin) use(static_cast<uint32_t>(rank));
    }
  }
  // Returns true if the rank was replaced and has not shown at which step it begins.
  bool HasYetToBegin(uint32_t rank) const { return ranks_[rank].yet_to_begin; }
  // Notes that the rank has shown at which step it begins. Returns false if it had before, or was never replaced.
  bool Begin(uint32_t rank);

  // Notes that a rank that goes on has told this shard generation that it sends no gradient of steps before `step`.
  void Resume(uint32_t rank, uint64_t step) { ranks_[rank].resumed_at = std::max(ranks_[rank].resumed_at, step); }
  bool ResumedAfter(uint32_t rank, uint64_t step) const { return ranks_[rank].resumed_at > step; }

  // Notes how many updates that the rank knows are missing here, and returns the most that has been noted of it.
  uint64_t NoteUpdatesLost(uint32_t rank, uint64_t lost) {
    return ranks_[rank].updates_lost = std::max(ranks_[rank].updates_lost, lost);
  }
  // Notes that a rank is told of `lost` updates, and returns how many of these no rank has been told of before.
  uint64_t NoteReported(uint64_t lost) {
    const uint64_t before = std::exchange(reported_lost_, std::max(reported_lost_, lost));
    return reported_lost_ - before;
  }

  // Notes that the rank, according to its RESUME, lacks the answer to `step` and has those to earlier steps. Forgotten
  // when the next answer is given.
  void Lack(uint32_t rank, uint64_t step) { ranks_[rank].lacks_from = step; }
  bool HasTold(uint32_t rank) const { return ranks_[rank].lacks_from.has_value(); }
  void ForgetLacks() {
    for (Rank& rank : ranks_) rank.lacks_from.reset();
  }
  // Returns true if a rank is known to lack the answers from another step than `step` on.
  bool AnyLacksFromOther(uint64_t step) const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [step](const Rank& rank) { return rank.lacks_from.has_value() && *rank.lacks_from != step; });
  }

  // Marks all ranks as lost: they know factors that the shard has lost, and must join again before they can go on.
  void LoseAll();
  bool IsLost(uint32_t rank) const { return ranks_[rank].lost; }
  // Returns the lowest lost rank, or nullopt if none is.
  std::optional<uint32_t> first_lost() const;

  // Progress of a replaced rank that holds factors.
  struct Catchup {
    uint64_t first_step = 0;  // where the process begins
    uint64_t step = 0;        // step that it has reached
    bool begun = false;       // the process has sent something; until then it may be told to begin earlier
    template <typename H>
    friend H AbslHashValue(H h, const Catchup& catchup) {
      return H::combine(std::move(h), catchup.first_step, catchup.step, catchup.begun);
    }
  };
  std::optional<Catchup>& catchup(uint32_t rank) { return ranks_[rank].catchup; }
  // Returns true if a replaced rank that holds factors has not reached `step`, so that it may still fetch factors of an
  // earlier step.
  bool IsAwaitedBefore(uint64_t step) const;
  // Calls `use(rank, catchup)` for each replaced rank that holds factors, by rank.
  template <typename Use>
  void ForEachCatchup(const Use& use) const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].catchup.has_value()) use(static_cast<uint32_t>(rank), *ranks_[rank].catchup);
    }
  }

  // Forgets where the ranks stood, because the job goes back to a checkpoint.
  void Rollback();

  template <typename H>
  friend H AbslHashValue(H h, const RankProgress& progress) {
    return H::combine(std::move(h), progress.ranks_, progress.reported_lost_);
  }

 private:
  struct Rank {
    bool heard = false;
    uint64_t first_step = 0;
    bool yet_to_begin = false;
    uint64_t resumed_at = 0;
    bool lost = false;
    uint64_t updates_lost = 0;
    std::optional<uint64_t> lacks_from;
    std::optional<Catchup> catchup;
    template <typename H>
    friend H AbslHashValue(H h, const Rank& rank) {
      return H::combine(std::move(h), rank.heard, rank.first_step, rank.yet_to_begin, rank.resumed_at, rank.lost,
                        rank.updates_lost, rank.lacks_from.has_value(), rank.lacks_from.value_or(0),
                        rank.catchup.has_value(), rank.catchup.value_or(Catchup{}));
    }
  };
  std::vector<Rank> ranks_;
  int64_t lost_ = 0;
  uint64_t reported_lost_ = 0;
};

}  // namespace precondor
