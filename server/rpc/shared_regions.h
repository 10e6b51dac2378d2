// SPDX-License-Identifier: Apache-2.0
// Regions of a shard's memory that it shares with workers of its host, one a stream (docs/adr/0012-device-plane.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/region_memory.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/slot_table.h"
#include "server/core/device_payload.h"
#include "server/core/memory_account.h"

namespace precondor::rpc {

class SharedRegions;

// The region of one stream; gradients in its slots, and answers on their way to them, hold it too. Thread-safe.
class StreamRegion : public std::enable_shared_from_this<StreamRegion> {
 public:
  StreamRegion(SharedRegions& regions, std::unique_ptr<SharedRegion> memory)
      : regions_(regions), memory_(std::move(memory)), slots_(static_cast<uint64_t>(memory_->bytes())) {}
  ~StreamRegion();

  const SharedRegion& memory() const { return *memory_; }

  // A gradient that its worker has written to a slot.
  struct Gradient {
    std::shared_ptr<StreamRegion> region;
    wire::Slot slot;  // the shard's, until GiveBack
    std::shared_ptr<const DevicePayload> payload;
  };
  // The gradient [rows, cols] at `offset`; from now on the slot is the shard's. Waits for the memory's device. Errors:
  // those of SlotTable::Take, and the device's.
  absl::StatusOr<Gradient> Take(uint64_t offset, int64_t rows, int64_t cols);
  // Writes an answer, [rows, cols] as the gradient was taken, to a slot that is the shard's. Waits for the device.
  // FailedPrecondition for a slot that has been given back.
  absl::Status Write(const wire::Slot& slot, ConstMatrixView answer);
  // The slot is the worker's again. No effect on one that has been given back.
  void GiveBack(const wire::Slot& slot) { slots_.GiveBack(slot); }
  // The worker has unmapped the region: it need not outlive its stream.
  void NoteUnmapped() { unmapped_.store(true, std::memory_order_relaxed); }

 private:
  MatrixView View(uint64_t offset, int64_t rows, int64_t cols) const;

  SharedRegions& regions_;
  std::unique_ptr<SharedRegion> memory_;
  wire::SlotTable slots_;
  std::atomic<bool> unmapped_ = false;
};

// Thread-safe. Outlives all streams and the shard's work.
class SharedRegions {
 public:
  // A worker whose stream has broken unmaps the region when it notices; CUDA leaves undefined what becomes of memory
  // that is freed before.
  static constexpr absl::Duration kLinger = absl::Seconds(10);

  // References outlive it. `most_bytes` of a region, all of which `account`, of the memory's device alone, has to have
  // left.
  SharedRegions(RegionMemory& memory, std::shared_ptr<MemoryAccount> account, int64_t most_bytes, const Clock& clock,
                Logger& logger)
      : memory_(memory), account_(std::move(account)), most_bytes_(most_bytes), clock_(clock), logger_(logger) {}
  ~SharedRegions();

  // Whether the peer of a call, as gRPC names it, came by a socket of this host's file system.
  static bool IsOnThisHost(const std::string& peer);

  v1::Ring Offer() const;
  // InvalidArgument (MALFORMED): of another kind, device, or 0 bytes; RESOURCE_EXHAUSTED (CAPACITY) where sessions have
  // reserved the memory; else the device's errors.
  absl::StatusOr<std::shared_ptr<StreamRegion>> Open(const v1::Ring& request);
  // Frees regions whose streams have ended for long enough; called every now and then.
  void Collect();

 private:
  friend class StreamRegion;
  struct Retired {
    std::unique_ptr<SharedRegion> memory;
    absl::Time due;
  };
  // On the account's one device.
  DeviceBytes Of(int64_t bytes) const { return {{bytes}}; }
  void Retire(std::unique_ptr<SharedRegion> memory, bool unmapped);

  RegionMemory& memory_;
  const std::shared_ptr<MemoryAccount> account_;
  const int64_t most_bytes_;
  const Clock& clock_;
  Logger& logger_;
  Mutex mu_;
  std::vector<Retired> retired_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::rpc
