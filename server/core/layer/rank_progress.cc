// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/rank_progress.h"

#include <algorithm>
#include <utility>

namespace precondor {

bool RankProgress::MarkHeard(uint32_t rank) { return !std::exchange(ranks_[rank].heard, true); }

void RankProgress::Replace(const Member& member, bool holds_factors) {
  Rank& rank = ranks_[member.rank];
  rank.first_step = member.first_step;
  rank.resumed_at = 0;
  rank.updates_lost = 0;
  rank.lacks_from.reset();
  if (member.first_step > 0) rank.yet_to_begin = true;
  if (holds_factors) rank.catchup = Catchup{.first_step = member.first_step, .step = member.first_step};
  if (std::exchange(rank.lost, false)) --lost_;
}

bool RankProgress::Begin(uint32_t rank) { return std::exchange(ranks_[rank].yet_to_begin, false); }

void RankProgress::LoseAll() {
  for (Rank& rank : ranks_) rank.lost = true;
  lost_ = static_cast<int64_t>(ranks_.size());
}

std::optional<uint32_t> RankProgress::first_lost() const {
  if (lost_ == 0) return std::nullopt;
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.lost; });
  return static_cast<uint32_t>(found - ranks_.begin());
}

bool RankProgress::IsAwaitedBefore(uint64_t step) const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [step](const Rank& rank) { return rank.catchup.has_value() && rank.catchup->step < step; });
}

void RankProgress::Rollback() {
  for (Rank& rank : ranks_) {
    rank.first_step = 0;
    rank.yet_to_begin = false;
    rank.resumed_at = 0;
    rank.lost = false;
    rank.updates_lost = 0;
    rank.lacks_from.reset();
    rank.catchup.reset();
  }
  lost_ = 0;
  reported_lost_ = 0;
}

}  // namespace precondor
