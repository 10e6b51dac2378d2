// SPDX-License-Identifier: Apache-2.0
// Memory that a shard shares with workers on its host, one region for each stream
// (docs/develop/adr/0012-device-plane.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"
#include "kernels/region_copy_queue.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/slot_table.h"
#include "server/core/api/contribution.h"
#include "server/core/resources/memory_account.h"

namespace precondor::rpc {

class SharedRegions;

// The shared region of one stream. Its gradients, and the callbacks that answer them, also hold it. Thread-safe.
class StreamRegion : public std::enable_shared_from_this<StreamRegion> {
 public:
  StreamRegion(SharedRegions& regions, std::unique_ptr<SharedRegion> memory)
      : regions_(regions), memory_(std::move(memory)), slots_(static_cast<uint64_t>(memory_->bytes())) {}
  ~StreamRegion();

  const SharedRegion& memory() const { return *memory_; }

  // A gradient that the worker has written to a slot.
  struct Gradient {
    std::shared_ptr<StreamRegion> region;
    wire::Slot slot;  // belongs to the shard until GiveBack
    std::shared_ptr<DevicePayload> payload;
  };
  // Returns the gradient [rows, cols] at `offset`, without its facts, and marks its slot as the shard's. Returns the
  // errors of SlotTable::Take.
  absl::StatusOr<Gradient> Take(uint64_t offset, int64_t rows, int64_t cols);
  // Sets the facts of gradients that Take has returned. Waits once for the memory's device. Returns its errors; then
  // the slots are the worker's again.
  absl::Status Inspect(absl::Span<const Gradient> gradients);
  // Writes an answer of the gradient's shape [rows, cols] to a slot of the shard, and then calls `done`, on another
  // thread, which keeps the answer's memory. Its status is FAILED_PRECONDITION if the slot has been given back.
  void Write(const wire::Slot& slot, ConstMatrixView answer, RegionCopyQueue::Done done);
  // Gives the slot back to the worker. Has no effect if it has been given back already.
  void GiveBack(const wire::Slot& slot) { slots_.GiveBack(slot); }
  // Records that the worker has unmapped the region, so that its memory need not outlive the stream.
  void NoteUnmapped() { unmapped_.store(true, std::memory_order_relaxed); }

 private:
  MatrixView View(uint64_t offset, int64_t rows, int64_t cols) const;

  SharedRegions& regions_;
  std::unique_ptr<SharedRegion> memory_;
  wire::SlotTable slots_;
  std::atomic<bool> unmapped_ = false;
};

// Allocates the regions of all streams, and frees them when their workers no longer map them. Thread-safe. Lifetime:
// outlives all streams and the shard's work.
class SharedRegions {
 public:
  // How long a region outlives a broken stream: its worker needs time to notice and to unmap it. In CUDA, it is
  // undefined behavior to free memory that another process still maps.
  static constexpr absl::Duration kLinger = absl::Seconds(10);

  // `most_bytes` is the greatest size of a region. Each region's bytes are reserved in `account`, of the device of
  // `memory`. Lifetime: all references outlive this object.
  SharedRegions(DevicePlane& memory, std::shared_ptr<MemoryAccount> account, int64_t most_bytes, const Clock& clock,
                Logger& logger)
      : memory_(memory),
        account_(std::move(account)),
        most_bytes_(most_bytes),
        clock_(clock),
        logger_(logger),
        answers_(std::make_unique<RegionCopyQueue>(memory)) {}
  ~SharedRegions();

  // Returns whether `peer`, as gRPC names the peer of a call, is connected by a Unix socket of this host.
  static bool IsOnThisHost(const std::string& peer);

  // Returns the kind, the device and the greatest size of a region, for a stream's CREDIT frame.
  v1::Ring Offer() const;
  // Allocates a region. Returns INVALID_ARGUMENT (MALFORMED) if the request has another kind, another device or 0
  // bytes; RESOURCE_EXHAUSTED (CAPACITY) if the account has too little memory left; otherwise the device's errors.
  absl::StatusOr<std::shared_ptr<StreamRegion>> Open(const v1::Ring& request);
  // Frees the regions of ended streams once the worker has unmapped them or kLinger has passed. Call it at intervals.
  void Collect();

 private:
  friend class StreamRegion;
  struct Retired {
    std::unique_ptr<SharedRegion> memory;
    absl::Time due;
  };
  void Retire(std::unique_ptr<SharedRegion> memory, bool unmapped);

  DevicePlane& memory_;
  const std::shared_ptr<MemoryAccount> account_;
  const int64_t most_bytes_;
  const Clock& clock_;
  Logger& logger_;
  Mutex mu_;
  std::vector<Retired> retired_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<RegionCopyQueue> answers_;  // writes answers; constant until the destructor
};

}  // namespace precondor::rpc
