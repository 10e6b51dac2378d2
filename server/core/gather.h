// SPDX-License-Identifier: Apache-2.0
// One slot per contributor of one (step, layer) and kind: who is in, with what, and what a repetition is worth.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/core/contribution.h"

namespace precondor {

// What a contributor's slot holds until it is reduced: the payload as it came, a fraction of what it takes decoded.
struct Vote {
  uint64_t samples = 0;
  Payload bytes = {};                                   // statistics: a, then g; or a gradient
  std::array<float, 2> scales = {1, 1};                 // of a and g; or of the gradient
  std::array<int64_t, 2> rows = {0, 0};                 // of a and g as COVARIANCE has them; 0: packed
  std::shared_ptr<const DevicePayload> on_device = {};  // a gradient's, in the place of `bytes`
  bool whole = false;                                   // a gradient in f32 that is the average already
};

// kRefused: the payload was not finite or over-norm; counts as an abstention.
enum class Standing : uint8_t { kMissing, kVoted, kAbstained, kRefused };

enum class PutOutcome : uint8_t { kTaken, kDuplicate, kConflict };

// Contributors are the ranks first_rank ... first_rank + count - 1. First write wins. Not thread-safe: the layer's
// lock guards it.
class Gather {
  struct Slot {
    Standing standing = Standing::kMissing;
    bool inherited = false;  // from an earlier holder of the rank, or by way of PutAll
    bool owed = false;       // its present holder is still to be answered
    uint64_t digest = 0;
    Vote vote;
  };

 public:
  // Besides the payload.
  static constexpr int64_t kBytesPerContributor = sizeof(Slot);

  Gather(uint32_t first_rank, uint32_t count) : first_rank_(first_rank), slots_(count) {}

  // Fills the rank's slot when it is empty. Otherwise: kDuplicate when `digest` is that of the slot, when a refused
  // payload is followed by the abstention that it counts as, or when the slot is inherited; kConflict for anything
  // else. `rank` is a contributor.
  PutOutcome Put(uint32_t rank, Standing standing, uint64_t digest, Vote vote);

  // All contributors at once, who have put `average` together elsewhere: it is the only vote, and everything that one
  // of them sends is a repetition. Not unless empty().
  void PutAll(absl::Span<const Standing> standings, Vote average);

  // Another process took the rank. What the earlier one sent stands, whatever the new one makes of the same step.
  // `repeats`: the new one will come to it, and is owed an answer. Nothing when `rank` is no contributor, or has not
  // contributed.
  void Inherit(uint32_t rank, bool repeats);
  // The rank has its answer.
  void Settle(uint32_t rank);
  // The lowest rank that is owed one.
  std::optional<uint32_t> owing() const;

  bool has(uint32_t rank) const { return slots_[rank - first_rank_].standing != Standing::kMissing; }
  bool empty() const { return voted_ + abstained_ == 0; }
  int64_t count() const { return static_cast<int64_t>(slots_.size()); }
  int64_t voted() const { return voted_; }
  int64_t abstained() const { return abstained_; }  // with the refused

  // Ranks whose slots are empty, ascending.
  std::vector<uint32_t> missing() const;

  // The next vote in rank order that no slot before it can still precede: nullopt when its slot is empty or all have
  // been taken. Slots without a vote are passed over. Each vote is given away once; standing and digest stay.
  std::optional<Vote> TakeNext();
  // The votes not yet taken, in rank order, empty slots passed over.
  std::vector<Vote> TakeRest();
  // Frees the votes' memory; standing and digests stay.
  void DropVotes();

  // Lowest rank that is in without a vote, as "rank 3 abstained" or "rank 3 sent a payload that was not finite".
  std::string Culprit() const;

 private:
  const uint32_t first_rank_;
  std::vector<Slot> slots_;
  size_t next_ = 0;  // slots before it have been taken
  int64_t voted_ = 0;
  int64_t abstained_ = 0;
};

}  // namespace precondor
