// SPDX-License-Identifier: Apache-2.0
// Device memory that a session's operations borrow, so that the steady state allocates nothing.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/mutex.h"

namespace precondor {

// Blocks that are made when they are first needed, and kept. All have one size, and there are never more of them than
// operations that ran at once; or each has the size that was asked for, and there are never more of a size than
// operations that asked for it and ran at once. When the size changes, blocks of before are freed as they are returned.
// Thread-safe. Outlives its leases.
class ScratchPool {
 public:
  class Lease {
   public:
    Lease(ScratchPool* pool, DeviceMatrix block, bool was_idle, uint64_t sizes)
        : pool_(pool), block_(std::move(block)), was_idle_(was_idle), sizes_(sizes) {}
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&& other) = delete;
    ~Lease() {
      if (!block_.empty()) pool_->Return({std::move(block_), is_idle_}, sizes_);
    }
    // A [rows, cols] matrix that begins `offset` elements into the block; it holds what the last user left.
    MatrixView view(int64_t offset, int64_t rows, int64_t cols) {
      return MatrixView(block_.view().data + offset, rows, cols);
    }
    // To a view of the block. The first, before anything else uses the lease, may run beside the operations under way:
    // where the borrower before has noted that none of them uses it.
    absl::Status Upload(ConstMatrixView host, MatrixView view) {
      return std::exchange(was_idle_, false) ? pool_->backend_.UploadToIdle(host, view)
                                             : pool_->backend_.Upload(host, view);
    }
    // Every operation that uses the block has ended, as a Download of what came last shows.
    void NoteIdle() { is_idle_ = true; }

   private:
    ScratchPool* pool_;
    DeviceMatrix block_;
    bool was_idle_;
    bool is_idle_ = false;
    uint64_t sizes_;  // the pool's when it was made
  };

  explicit ScratchPool(Backend& backend) : backend_(backend) {}
  // A block of at least `elements`. ResourceExhausted when the device has no memory left.
  absl::StatusOr<Lease> Acquire(int64_t elements);
  // From now on blocks have this size; with 0, which it is at first, the size that is asked for.
  void SetBlockElements(int64_t block_elements);
  // Frees the blocks that are not borrowed.
  void Trim();

 private:
  struct Block {
    DeviceMatrix memory;
    bool idle = false;
  };
  void Return(Block block, uint64_t sizes);

  Backend& backend_;
  Mutex mu_;
  int64_t block_elements_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t sizes_ ABSL_GUARDED_BY(mu_) = 0;  // how often the size has changed
  std::vector<Block> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
