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

// A pool of blocks of device memory. Blocks are allocated when they are first needed, and kept. With a block size, the
// pool has no more blocks than operations that ran at once. Without one, a block has the size that was asked for, and
// the pool has no more blocks of a size than operations that asked for it and ran at once. Thread-safe. Must outlive
// its leases.
class ScratchPool {
 public:
  class Lease {
   public:
    Lease(ScratchPool* pool, DeviceMatrix block, bool was_idle)
        : pool_(pool), block_(std::move(block)), was_idle_(was_idle) {}
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&& other) = delete;
    ~Lease() {
      if (!block_.empty()) pool_->Return({std::move(block_), is_idle_});
    }
    // Returns a [rows, cols] matrix that begins `offset` elements into the block. It holds what the last user left.
    MatrixView view(int64_t offset, int64_t rows, int64_t cols) {
      return MatrixView(block_.view().data + offset, rows, cols);
    }
    // Copies `host` to `view`, a view of the block. If the last borrower has called NoteIdle, the first upload need not
    // wait for the operations under way, because none of them uses the block. Precondition: nothing has used the lease
    // before its first upload.
    absl::Status Upload(ConstMatrixView host, MatrixView view) {
      return std::exchange(was_idle_, false) ? pool_->backend_.UploadToIdle(host, view)
                                             : pool_->backend_.Upload(host, view);
    }
    // Notes that every operation that uses the block has ended, as a Download of the last result shows.
    void NoteIdle() { is_idle_ = true; }

   private:
    ScratchPool* pool_;
    DeviceMatrix block_;
    bool was_idle_;
    bool is_idle_ = false;
  };

  // `block_elements`: the size of blocks; 0: the size that is asked for.
  explicit ScratchPool(Backend& backend, int64_t block_elements = 0)
      : backend_(backend), block_elements_(block_elements) {}
  // Returns a block of at least `elements` f32. Returns ResourceExhausted if the device has no memory left.
  absl::StatusOr<Lease> Acquire(int64_t elements);
  // Frees the blocks that are not borrowed.
  void Trim();

 private:
  struct Block {
    DeviceMatrix memory;
    bool idle = false;
  };
  void Return(Block block);

  Backend& backend_;
  const int64_t block_elements_;
  Mutex mu_;
  std::vector<Block> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
