// SPDX-License-Identifier: Apache-2.0
// Device memory that a session's operations borrow, so that the steady state allocates nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/base/mutex.h"

namespace precondor {

// Blocks of one size, made when first needed and kept; there are never more than operations that ran at once. When the
// size grows, blocks of the old one go as they are returned.
// Thread-safe. Outlives its leases.
class ScratchPool {
 public:
  class Lease {
   public:
    Lease(ScratchPool* pool, DeviceMatrix block) : pool_(pool), block_(std::move(block)) {}
    Lease(Lease&& other) noexcept = default;
    Lease& operator=(Lease&& other) = delete;
    ~Lease() {
      if (!block_.empty()) pool_->Return(std::move(block_));
    }
    // A [rows, cols] matrix that begins `offset` elements into the block; it holds what the last user left.
    MatrixView view(int64_t offset, int64_t rows, int64_t cols) {
      return MatrixView(block_.view().data + offset, rows, cols);
    }

   private:
    ScratchPool* pool_;
    DeviceMatrix block_;
  };

  ScratchPool(Backend& backend, int64_t block_elements) : backend_(backend), block_elements_(block_elements) {}
  // ResourceExhausted when the device has no memory left.
  absl::StatusOr<Lease> Acquire();
  // Blocks have at least this size from now on.
  void Grow(int64_t block_elements);
  // Frees the blocks that nobody borrows.
  void Trim();

 private:
  void Return(DeviceMatrix block);

  Backend& backend_;
  Mutex mu_;
  int64_t block_elements_ ABSL_GUARDED_BY(mu_);
  std::vector<DeviceMatrix> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor
