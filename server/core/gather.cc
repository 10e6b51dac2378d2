// SPDX-License-Identifier: Apache-2.0
#include "server/core/gather.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace precondor {

PutOutcome Gather::Put(uint32_t rank, Standing standing, uint64_t digest, Vote vote) {
  Slot& slot = slots_[rank - first_rank_];
  if (slot.standing == Standing::kMissing) {
    slot.standing = standing;
    slot.digest = digest;
    slot.vote = std::move(vote);
    ++(standing == Standing::kVoted ? voted_ : abstained_);
    return PutOutcome::kTaken;
  }
  if (slot.digest == digest || slot.inherited) return PutOutcome::kDuplicate;
  if (slot.standing == Standing::kRefused && standing == Standing::kAbstained) return PutOutcome::kDuplicate;
  return PutOutcome::kConflict;
}

void Gather::PutAll(absl::Span<const Standing> standings, Vote average) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].standing = standings[i];
    slots_[i].inherited = true;
    ++(standings[i] == Standing::kVoted ? voted_ : abstained_);
  }
  if (abstained_ > 0) return;
  next_ = slots_.size() - 1;
  slots_.back().vote = std::move(average);
}

void Gather::Inherit(uint32_t rank, bool repeats) {
  if (rank < first_rank_ || rank - first_rank_ >= slots_.size()) return;
  Slot& slot = slots_[rank - first_rank_];
  if (slot.standing == Standing::kMissing) return;
  slot.inherited = true;
  slot.owed = repeats;
}

void Gather::Settle(uint32_t rank) {
  if (rank >= first_rank_ && rank - first_rank_ < slots_.size()) slots_[rank - first_rank_].owed = false;
}

std::optional<uint32_t> Gather::owing() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].owed) return first_rank_ + static_cast<uint32_t>(i);
  }
  return std::nullopt;
}

std::vector<uint32_t> Gather::missing() const {
  std::vector<uint32_t> ranks;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].standing == Standing::kMissing) ranks.push_back(first_rank_ + static_cast<uint32_t>(i));
  }
  return ranks;
}

std::optional<Vote> Gather::TakeNext() {
  for (; next_ < slots_.size(); ++next_) {
    Slot& slot = slots_[next_];
    if (slot.standing == Standing::kMissing) return std::nullopt;
    if (slot.standing == Standing::kVoted) {
      ++next_;
      return std::move(slot.vote);
    }
  }
  return std::nullopt;
}

std::vector<Vote> Gather::TakeRest() {
  std::vector<Vote> votes;
  for (; next_ < slots_.size(); ++next_) {
    if (slots_[next_].standing == Standing::kVoted) votes.push_back(std::move(slots_[next_].vote));
  }
  return votes;
}

void Gather::DropVotes() {
  for (Slot& slot : slots_) slot.vote = Vote();
}

std::string Gather::Culprit() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Standing standing = slots_[i].standing;
    if (standing == Standing::kAbstained) return absl::StrCat("rank ", first_rank_ + i, " abstained");
    if (standing == Standing::kRefused) {
      return absl::StrCat("rank ", first_rank_ + i, " sent a payload that was not finite");
    }
  }
  return "";
}

}  // namespace precondor
