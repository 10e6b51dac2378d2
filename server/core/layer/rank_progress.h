// SPDX-License-Identifier: Apache-2.0
// What a layer knows of where each rank stands, besides the contributions of the window's steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"

#include "server/core/shard/shard_control.h"

namespace precondor {

// A value; not thread-safe. Ranks are those of the session.
class RankProgress {
 public:
  explicit RankProgress(int64_t world_size) : ranks_(static_cast<size_t>(world_size)) {}

  // The rank has sent something to this shard generation. False when it had before.
  bool Hear(uint32_t rank);

  // Another process holds the rank now, or this shard generation begins in an epoch of which it is a member: what it
  // sent to the one before is not known. `holds_factors`: it has factors of its own, fetched from here.
  void Replace(const Member& member, bool holds_factors);
  // Calls `use(rank)` for each that has begun after `step`, and so sends nothing to it. One that has yet to begin may
  // still be told to begin earlier.
  template <typename Use>
  void ForEachThatBeganAfter(uint64_t step, const Use& use) const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].first_step > step && !ranks_[rank].yet_to_begin) use(static_cast<uint32_t>(rank));
    }
  }
  // The replaced rank has yet to show at which step it begins.
  bool HasYetToBegin(uint32_t rank) const { return ranks_[rank].yet_to_begin; }
  // It has shown that. False when it had before, or was never replaced.
  bool Begin(uint32_t rank);

  // A rank that goes on has told this shard generation that it sends no gradient of steps before `step`.
  void Resume(uint32_t rank, uint64_t step) { ranks_[rank].resumed_at = std::max(ranks_[rank].resumed_at, step); }
  bool ResumedAfter(uint32_t rank, uint64_t step) const { return ranks_[rank].resumed_at > step; }

  // All ranks know factors that are lost, and cannot go on before each has joined anew.
  void LoseAll();
  bool AnyLost() const { return lost_ > 0; }
  bool IsLost(uint32_t rank) const { return ranks_[rank].lost; }
  uint32_t first_lost() const;

  // Replaced ranks that hold factors.
  struct Catchup {
    uint64_t first_step = 0;  // where the process begins
    uint64_t step = 0;        // where it has come to
    bool begun = false;       // it has sent something: until then it may be told to begin earlier
    template <typename H>
    friend H AbslHashValue(H h, const Catchup& catchup) {
      return H::combine(std::move(h), catchup.first_step, catchup.step, catchup.begun);
    }
  };
  std::optional<Catchup>& catchup(uint32_t rank) { return ranks_[rank].catchup; }
  // A process that begins again before `step` may still fetch the factors of that time.
  bool IsAwaitedBefore(uint64_t step) const;
  // Calls `use(rank, catchup)` for each, by rank.
  template <typename Use>
  void ForEachCatchup(const Use& use) const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].catchup.has_value()) use(static_cast<uint32_t>(rank), *ranks_[rank].catchup);
    }
  }

  // The job goes back to a checkpoint: where ranks stood does not count any more.
  void Rollback();

  template <typename H>
  friend H AbslHashValue(H h, const RankProgress& progress) {
    return H::combine(std::move(h), progress.ranks_);
  }

 private:
  struct Rank {
    bool heard = false;
    uint64_t first_step = 0;
    bool yet_to_begin = false;
    uint64_t resumed_at = 0;
    bool lost = false;
    std::optional<Catchup> catchup;
    template <typename H>
    friend H AbslHashValue(H h, const Rank& rank) {
      return H::combine(std::move(h), rank.heard, rank.first_step, rank.yet_to_begin, rank.resumed_at, rank.lost,
                        rank.catchup.has_value(), rank.catchup.value_or(Catchup{}));
    }
  };
  std::vector<Rank> ranks_;
  int64_t lost_ = 0;
};

}  // namespace precondor
