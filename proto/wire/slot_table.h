// SPDX-License-Identifier: Apache-2.0
// Which byte ranges of a shared region are in use. A worker keeps a table of the slots that it has handed to the shard,
// and the shard keeps a table of the slots that it was handed, so that each side checks the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"

namespace precondor::wire {

// One use of a range. `ring_offset` and `payload_bytes` of a frame say where it lies; the generation stays in the
// process.
struct Slot {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t generation = 0;  // of the use: no two uses of a table have the same one
};

// Invariant: the ranges in use are apart from each other and inside the region. Thread-safe.
class SlotTable {
 public:
  // Offsets are multiples of this.
  static constexpr uint64_t kAlignment = 256;
  // The room that a payload of `bytes` takes when slots follow each other.
  static constexpr uint64_t Aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // `bytes` of the region.
  explicit SlotTable(uint64_t bytes) : bytes_(bytes) {}

  // Begins a use of [offset, offset + bytes). InvalidArgument (MALFORMED): the offset is not a multiple of kAlignment,
  // or the range is empty, not inside the region, or meets a range in use. FailedPrecondition after Close.
  absl::StatusOr<Slot> Take(uint64_t offset, uint64_t bytes);
  // Ends a use. Returns false, without effect, for one that has ended already, whatever is in use at its place now.
  bool GiveBack(const Slot& slot);
  // Whether this use has not ended.
  bool Holds(const Slot& slot) const;
  // Ends all uses; none can begin any more.
  void Close();

  uint64_t bytes() const { return bytes_; }
  size_t in_use() const;

 private:
  bool HoldsLocked(const Slot& slot) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint64_t bytes_;
  mutable Mutex mu_;
  std::map<uint64_t, Slot> slots_ ABSL_GUARDED_BY(mu_);  // in use, by offset
  uint64_t last_generation_ ABSL_GUARDED_BY(mu_) = 0;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace precondor::wire
