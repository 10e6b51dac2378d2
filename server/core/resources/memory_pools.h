// SPDX-License-Identifier: Apache-2.0
// Memory that a session's operations borrow, so that the steady state allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/base/mutex.h"
#include "kernels/base/session_spec.h"
#include "server/core/api/contribution.h"

namespace precondor {

// Host memory whose size depends on a session's layers: if the system refuses it, the result is a status and the
// process goes on. An array of elements that are about to be overwritten: unlike std::vector it does not clear them
// first. Not thread-safe.
template <typename T>
class HostBuffer {
 public:
  HostBuffer() = default;
  // Returns ResourceExhausted, with the number of bytes, if the system refuses the memory.
  static absl::StatusOr<HostBuffer> Make(int64_t size) {
    HostBuffer buffer;
    buffer.data_.reset(new (std::nothrow) T[size]);
    if (buffer.data_ == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host memory: the system refused ", size * static_cast<int64_t>(sizeof(T)), " bytes"));
    }
    buffer.size_ = size;
    return buffer;
  }

  absl::Span<T> span() { return {data_.get(), static_cast<size_t>(size_)}; }
  absl::Span<const T> span() const { return {data_.get(), static_cast<size_t>(size_)}; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

// Device memory that a session's operations borrow, in blocks. Blocks are allocated when they are first needed, and
// kept. With a block size, the pool has no more blocks than operations that ran at once. Without one, a block has the
// size that was asked for, and the pool has no more blocks of a size than operations that asked for it and ran at once.
// Thread-safe. Must outlive its leases.
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

// Returns the most bytes that a session keeps: for each rank its largest gradient, up to 64 MiB.
int64_t MostKeptBytes(const SessionSpec& spec);

// Large payloads that a session has freed and keeps for its next gradients: to get their pages from the system costs as
// much as to move them. Thread-safe. Hold it by shared_ptr: what it has shared can outlive it.
class PayloadPool : public std::enable_shared_from_this<PayloadPool> {
 public:
  // Smaller payloads are malloc's, which keeps their pages.
  static constexpr uint64_t kLeastBytes = uint64_t{1} << 20;

  explicit PayloadPool(int64_t most_bytes) : most_bytes_(static_cast<uint64_t>(most_bytes)) {}

  // Returns an empty payload, with room for `bytes` if one is kept that is at most a sixteenth larger.
  Payload Take(uint64_t bytes);
  // Keeps the payload's memory if there is room for it. Its contents are of no use any more.
  void Give(Payload payload);
  // Returns the payload, whose memory is given back with its last reference.
  std::shared_ptr<const Payload> Share(Payload payload);

 private:
  const uint64_t most_bytes_;
  Mutex mu_;
  std::vector<Payload> kept_ ABSL_GUARDED_BY(mu_);
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace precondor
