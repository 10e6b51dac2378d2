// SPDX-License-Identifier: Apache-2.0
// Records which byte ranges of a shared region are in use. The worker has a table of the slots that it has passed to
// the shard, and the shard has a table of the slots that it has received, so that each side checks the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/base/mutex.h"
#include "precondor/v1/precondition.pb.h"

namespace precondor::wire {

// One use of a range. The fields `ring_offset` and `payload_bytes` of a frame give the range. The generation is not
// transmitted.
struct Slot {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t generation = 0;  // identifies the use; unique within a table
};

// Invariant: the ranges in use do not overlap and are inside the region. Thread-safe.
class SlotTable {
 public:
  // Every offset is a multiple of this.
  static constexpr uint64_t kAlignment = 256;
  // Returns the space that a payload of `bytes` takes if slots follow each other.
  static constexpr uint64_t Aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // `bytes`: size of the region.
  explicit SlotTable(uint64_t bytes) : bytes_(bytes) {}

  // Begins a use of [offset, offset + bytes). Returns InvalidArgument (MALFORMED) if the offset is not a multiple of
  // kAlignment, or if the range is empty, not inside the region or overlaps a range in use. Returns FailedPrecondition
  // after Close.
  absl::StatusOr<Slot> Take(uint64_t offset, uint64_t bytes);
  // Ends a use. Returns false, without effect, if this use has already ended, even if its range is in use again.
  bool GiveBack(const Slot& slot);
  // Returns true if this use has not ended.
  bool Holds(const Slot& slot) const;
  // Ends all uses and refuses new ones.
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

// --- descriptions of shared regions, which the protocol calls rings

// Describes a region of `bytes` in the memory of the CUDA device `device`. `handle` is empty unless the region exists.
v1::Ring EncodeRegion(const std::string& device, uint64_t bytes, const std::string& handle = "");
// Checks that a request or a granted ring is in the memory of this CUDA device and has more than 0 bytes. Returns
// InvalidArgument (MALFORMED) with the difference if not.
absl::Status CheckRegion(const v1::Ring& got, const std::string& device);

}  // namespace precondor::wire
