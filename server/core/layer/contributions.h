// SPDX-License-Identifier: Apache-2.0
// Records which ranks have contributed to one (step, kind) of a layer and classifies repeated contributions.
// LayerDriver holds the payloads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace precondor {

// State of one rank's slot. kRefused means that the payload was not finite or over-norm; it counts as an abstention.
enum class ContributionStatus : uint8_t { kMissing, kPresent, kAbstained, kRefused };

enum class PutOutcome : uint8_t { kTaken, kDuplicate, kConflict };

// Has one slot for each rank that contributes to a (step, kind): ranks first_rank ... first_rank + count - 1. The first
// write to a slot wins. A value type; not thread-safe.
class Contributions {
  struct Slot {
    ContributionStatus status = ContributionStatus::kMissing;
    bool inherited = false;  // written by an earlier process of the rank, or by PutAllRestored
    bool owed = false;       // the rank's current process still needs the answer
    uint64_t digest = 0;
    template <typename H>
    friend H AbslHashValue(H h, const Slot& slot) {
      return H::combine(std::move(h), slot.status, slot.inherited, slot.owed, slot.digest);
    }
  };

 public:
  Contributions(uint32_t first_rank, uint32_t count) : first_rank_(first_rank), slots_(count) {}

  // Fills the rank's slot and returns kTaken if the slot is empty. Otherwise returns kDuplicate if `digest` equals the
  // slot's digest, if the slot is inherited, or if the slot is kRefused and `status` is kAbstained; returns kConflict
  // in all other cases. Precondition: `rank` is a contributor.
  PutOutcome Put(uint32_t rank, ContributionStatus status, uint64_t digest);

  // Fills all slots with contributions whose payloads the journal's average replaces. Each later contribution is a
  // duplicate. Precondition: empty().
  void PutAllRestored();

  // Records that another process now holds `rank`. The slot keeps the contribution of the earlier process, and the
  // rank's later contributions are duplicates whatever their bytes. `repeats` says that the new process sends this step
  // again, so that it is owed an answer. Does nothing if `rank` is not a contributor or its slot is empty.
  void Inherit(uint32_t rank, bool repeats);
  // Records that the rank has its answer. Does nothing if `rank` is not a contributor.
  void MarkAnswered(uint32_t rank);
  // Returns the lowest rank that is owed an answer, or nullopt if no rank is.
  std::optional<uint32_t> owed_rank() const;

  bool has(uint32_t rank) const { return slots_[rank - first_rank_].status != ContributionStatus::kMissing; }
  bool empty() const { return present_ + abstained_ == 0; }
  int64_t count() const { return static_cast<int64_t>(slots_.size()); }
  int64_t present() const { return present_; }
  int64_t abstained() const { return abstained_; }  // includes refused payloads
  int64_t arrived() const { return present_ + abstained_; }

  // Returns whether a slot was written by an earlier process of its rank, or by PutAllRestored.
  bool any_inherited() const;

  // Returns the ranks whose slots are empty, in ascending order.
  std::vector<uint32_t> missing() const;

  // Returns the next rank, in rank order, whose payload can be used although higher ranks may be missing. Returns
  // nullopt if the slot of a lower rank is empty or no payload is left. Returns each rank at most once.
  std::optional<uint32_t> TakeNext();
  // Returns the ranks with a payload that TakeNext has not returned, in rank order. Skips empty slots.
  std::vector<uint32_t> TakeRest();

  // Describes the lowest rank that abstained or whose payload was refused: "rank 3 abstained" or "rank 3 sent a payload
  // that was not finite". Returns an empty string if there is none.
  std::string DescribeAbstention() const;

  template <typename H>
  friend H AbslHashValue(H h, const Contributions& contributions) {
    return H::combine(std::move(h), contributions.slots_, contributions.next_);
  }

 private:
  uint32_t first_rank_;
  std::vector<Slot> slots_;
  size_t next_ = 0;  // first slot that TakeNext and TakeRest have not visited
  int64_t present_ = 0;
  int64_t abstained_ = 0;
};

}  // namespace precondor
