// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/contributions.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/core/resources/reservation.h"

namespace precondor {

PutOutcome Contributions::Put(uint32_t rank, ContributionStatus status, uint64_t digest) {
  static_assert(sizeof(Slot) <= kBytesPerSlot, "the reservation counts slots");
  Slot& slot = slots_[rank - first_rank_];
  if (slot.status == ContributionStatus::kMissing) {
    slot.status = status;
    slot.digest = digest;
    ++(status == ContributionStatus::kPresent ? present_ : abstained_);
    return PutOutcome::kTaken;
  }
  if (slot.digest == digest || slot.inherited) return PutOutcome::kDuplicate;
  if (slot.status == ContributionStatus::kRefused && status == ContributionStatus::kAbstained) {
    return PutOutcome::kDuplicate;
  }
  return PutOutcome::kConflict;
}

void Contributions::PutAllRestored() {
  for (Slot& slot : slots_) {
    slot.status = ContributionStatus::kPresent;
    slot.inherited = true;
  }
  present_ = count();
  next_ = slots_.size();
}

void Contributions::Inherit(uint32_t rank, bool repeats) {
  if (rank < first_rank_ || rank - first_rank_ >= slots_.size()) return;
  Slot& slot = slots_[rank - first_rank_];
  if (slot.status == ContributionStatus::kMissing) return;
  slot.inherited = true;
  slot.owed = repeats;
}

void Contributions::MarkAnswered(uint32_t rank) {
  if (rank >= first_rank_ && rank - first_rank_ < slots_.size()) slots_[rank - first_rank_].owed = false;
}

std::optional<uint32_t> Contributions::owed_rank() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].owed) return first_rank_ + static_cast<uint32_t>(i);
  }
  return std::nullopt;
}

bool Contributions::any_inherited() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.inherited; });
}

std::vector<uint32_t> Contributions::missing() const {
  std::vector<uint32_t> ranks;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].status == ContributionStatus::kMissing) ranks.push_back(first_rank_ + static_cast<uint32_t>(i));
  }
  return ranks;
}

std::optional<uint32_t> Contributions::TakeNext() {
  for (; next_ < slots_.size(); ++next_) {
    const ContributionStatus status = slots_[next_].status;
    if (status == ContributionStatus::kMissing) return std::nullopt;
    if (status == ContributionStatus::kPresent) return first_rank_ + static_cast<uint32_t>(next_++);
  }
  return std::nullopt;
}

std::vector<uint32_t> Contributions::TakeRest() {
  std::vector<uint32_t> ranks;
  for (; next_ < slots_.size(); ++next_) {
    if (slots_[next_].status == ContributionStatus::kPresent)
      ranks.push_back(first_rank_ + static_cast<uint32_t>(next_));
  }
  return ranks;
}

std::string Contributions::DescribeAbstention() const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const ContributionStatus status = slots_[i].status;
    if (status == ContributionStatus::kAbstained) return absl::StrCat("rank ", first_rank_ + i, " abstained");
    if (status == ContributionStatus::kRefused) {
      return absl::StrCat("rank ", first_rank_ + i, " sent a payload that was not finite");
    }
  }
  return "";
}

}  // namespace precondor
