// SPDX-License-Identifier: Apache-2.0
// Rings in the memory of a shard's device that it shares with workers of its host, one a stream
// (docs/adr/0012-device-plane.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/device_plane.h"
#include "precondor/v1/precondition.pb.h"
#include "server/core/device_payload.h"
#include "server/core/memory_account.h"

namespace precondor::rpc {

class DeviceRings;

// The ring of one stream; gradients that lie in it and answers on their way hold it too. Thread-safe.
class StreamRing : public std::enable_shared_from_this<StreamRing> {
 public:
  StreamRing(DeviceRings& rings, std::unique_ptr<SharedRing> memory) : rings_(rings), memory_(std::move(memory)) {}
  ~StreamRing();

  const SharedRing& memory() const { return *memory_; }
  // The gradient [rows, cols] that lies at `offset`; from now on the range is the shard's. Waits for the device.
  // InvalidArgument (MALFORMED): the offset is not a multiple of 256, or the range does not lie in the ring or not
  // apart from others that are the shard's. Else the device's errors.
  absl::StatusOr<std::shared_ptr<const DevicePayload>> Take(uint64_t offset, int64_t rows, int64_t cols);
  // Writes an answer to a range that is the shard's, [rows, cols] as it was taken. Waits for the device.
  absl::Status Write(uint64_t offset, ConstMatrixView answer);
  // The range is the worker's again.
  void GiveBack(uint64_t offset);
  // The worker has unmapped it: it need not outlive its stream.
  void NoteUnmapped() { unmapped_.store(true, std::memory_order_relaxed); }

 private:
  MatrixView View(uint64_t offset, int64_t rows, int64_t cols) const;

  DeviceRings& rings_;
  std::unique_ptr<SharedRing> memory_;
  std::atomic<bool> unmapped_ = false;
  Mutex mu_;
  std::map<uint64_t, uint64_t> taken_ ABSL_GUARDED_BY(mu_);  // ranges that are the shard's: where each ends
};

// Thread-safe. Outlives all streams and the shard's work.
class DeviceRings {
 public:
  // A worker whose stream has broken unmaps the ring when it notices; CUDA leaves undefined what becomes of memory that
  // is freed before.
  static constexpr absl::Duration kLinger = absl::Seconds(10);

  // References outlive it. `most_bytes` of a ring, all of which `account`, of the plane's device alone, has to have
  // left.
  DeviceRings(DevicePlane& plane, std::shared_ptr<MemoryAccount> account, int64_t most_bytes, const Clock& clock,
              Logger& logger)
      : plane_(plane), account_(std::move(account)), most_bytes_(most_bytes), clock_(clock), logger_(logger) {}
  ~DeviceRings();

  // Whether the peer of a call, as gRPC names it, came by a socket of this host's file system.
  static bool IsOnThisHost(const std::string& peer);

  v1::Ring Offer() const;
  // InvalidArgument (MALFORMED): of another kind, device, or 0 bytes; RESOURCE_EXHAUSTED (CAPACITY) where sessions have
  // reserved the memory; else the device's errors.
  absl::StatusOr<std::shared_ptr<StreamRing>> Open(const v1::Ring& request);
  // Frees rings whose streams have ended for long enough; called every now and then.
  void Collect();

 private:
  friend class StreamRing;
  struct Retired {
    std::unique_ptr<SharedRing> memory;
    absl::Time due;
  };
  // On the account's one device.
  DeviceBytes Of(int64_t bytes) const { return {{bytes}}; }
  void Retire(std::unique_ptr<SharedRing> memory, bool unmapped);

  DevicePlane& plane_;
  const std::shared_ptr<MemoryAccount> account_;
  const int64_t most_bytes_;
  const Clock& clock_;
  Logger& logger_;
  Mutex mu_;
  std::vector<Retired> retired_ ABSL_GUARDED_BY(mu_);
};

}  // namespace precondor::rpc
