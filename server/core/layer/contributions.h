// SPDX-License-Identifier: Apache-2.0
// Which ranks have contributed to one (step, kind) of a layer, and what a repetition is worth. Payloads are elsewhere
// (LayerDriver).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace precondor {

// What a rank's slot holds. kRefused: the payload was not finite or over-norm; counts as an abstention.
enum class ContributionStatus : uint8_t { kMissing, kPresent, kAbstained, kRefused };

enum class PutOutcome : uint8_t { kTaken, kDuplicate, kConflict };

// The contributors are the ranks first_rank ... first_rank + count - 1. The first write to a slot wins. A value; not
// thread-safe.
class Contributions {
  struct Slot {
    ContributionStatus status = ContributionStatus::kMissing;
    bool inherited = false;  // from an earlier process that held the rank, or by way of PutAll
    bool owed = false;       // the process that holds the rank now has not had its answer
    uint64_t digest = 0;
    template <typename H>
    friend H AbslHashValue(H h, const Slot& slot) {
      return H::combine(std::move(h), slot.status, slot.inherited, slot.owed, slot.digest);
    }
  };

 public:
  static constexpr int64_t kBytesPerContributor = sizeof(Slot);

  Contributions(uint32_t first_rank, uint32_t count) : first_rank_(first_rank), slots_(count) {}

  // Fills the rank's slot when it is empty. Otherwise: kDuplicate when `digest` equals the slot's, when a refused
  // payload is followed by the abstention that it counts as, or when the slot is inherited; kConflict for anything
  // else. `rank` is a contributor.
  PutOutcome Put(uint32_t rank, ContributionStatus status, uint64_t digest);

  // Fills all slots at once, for ranks that have made their average elsewhere: its payload is the last rank's, and
  // each later contribution is a duplicate. Precondition: empty().
  void PutAll(absl::Span<const ContributionStatus> statuses);

  // Another process holds the rank now. What the earlier process sent stands, and a repetition with other bytes is a
  // duplicate. `repeats`: the new process sends this step again, and is owed an answer. Does nothing when `rank` is no
  // contributor or its slot is empty.
  void Inherit(uint32_t rank, bool repeats);
  // The rank has its answer. Does nothing when `rank` is no contributor.
  void MarkAnswered(uint32_t rank);
  // The lowest rank that is owed an answer.
  std::optional<uint32_t> owed_rank() const;

  bool has(uint32_t rank) const { return slots_[rank - first_rank_].status != ContributionStatus::kMissing; }
  bool empty() const { return present_ + abstained_ == 0; }
  int64_t count() const { return static_cast<int64_t>(slots_.size()); }
  int64_t present() const { return present_; }
  int64_t abstained() const { return abstained_; }  // with the refused
  int64_t arrived() const { return present_ + abstained_; }

  // Ranks whose slots are empty, ascending.
  std::vector<uint32_t> missing() const;

  // The next rank, in rank order, whose payload can be used before the others are in: nullopt when a slot before it is
  // empty, or no payload is left. Gives each rank once.
  std::optional<uint32_t> TakeNext();
  // The ranks with a payload that TakeNext has not given, in rank order. Passes over empty slots.
  std::vector<uint32_t> TakeRest();

  // The lowest rank without a payload, as "rank 3 abstained" or "rank 3 sent a payload that was not finite".
  std::string DescribeAbstention() const;

  template <typename H>
  friend H AbslHashValue(H h, const Contributions& contributions) {
    return H::combine(std::move(h), contributions.slots_, contributions.next_);
  }

 private:
  uint32_t first_rank_;
  std::vector<Slot> slots_;
  size_t next_ = 0;  // TakeNext and TakeRest have given the slots before it
  int64_t present_ = 0;
  int64_t abstained_ = 0;
};

}  // namespace precondor
