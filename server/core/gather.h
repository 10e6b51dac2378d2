// SPDX-License-Identifier: Apache-2.0
// One slot per contributor of one (step, layer) and kind: who is in, with what, and what a repetition is worth.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

#include "server/core/contribution.h"

namespace precondor {

// Floats on the host that are about to be overwritten: unlike std::vector it does not clear them first.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(int64_t size) : data_(new float[size]), size_(size) {}
  float* data() { return data_.get(); }
  const float* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  std::unique_ptr<float[]> data_;
  int64_t size_ = 0;
};

// What a contributor's slot holds until it is reduced.
struct Vote {
  uint64_t samples = 0;
  FloatBuffer values = {};  // statistics: a [q, d_in], then g [q, d_out], decoded
  Payload bytes = {};       // gradient: as it came
  float scale = 1.0f;       // of `bytes`
};

// kRefused: the payload was not finite or over-norm; counts as an abstention.
enum class Standing : uint8_t { kMissing, kVoted, kAbstained, kRefused };

enum class PutOutcome : uint8_t { kTaken, kDuplicate, kConflict };

// Contributors are the ranks first_rank ... first_rank + count - 1. First write wins. Not thread-safe: the layer's
// lock guards it.
class Gather {
 public:
  Gather(uint32_t first_rank, uint32_t count) : first_rank_(first_rank), slots_(count) {}

  // Fills the rank's slot when it is empty. Otherwise: kDuplicate when `digest` is that of the slot, or when a refused
  // payload is followed by the abstention that it counts as; kConflict for anything else. `rank` is a contributor.
  PutOutcome Put(uint32_t rank, Standing standing, uint64_t digest, Vote vote);

  bool has(uint32_t rank) const { return slots_[rank - first_rank_].standing != Standing::kMissing; }
  bool empty() const { return voted_ + abstained_ == 0; }
  int64_t count() const { return static_cast<int64_t>(slots_.size()); }
  int64_t voted() const { return voted_; }
  int64_t abstained() const { return abstained_; }  // with the refused

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
  struct Slot {
    Standing standing = Standing::kMissing;
    uint64_t digest = 0;
    Vote vote;
  };
  const uint32_t first_rank_;
  std::vector<Slot> slots_;
  size_t next_ = 0;  // slots before it have been taken
  int64_t voted_ = 0;
  int64_t abstained_ = 0;
};

}  // namespace precondor
