// SPDX-License-Identifier: Apache-2.0
// Notifications of server/rpc about payloads in transit.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace precondor {

// How a payload travels between a worker and this process: frames of a stream, a unary call, or a ring in the memory
// of a device.
enum class TransferPath : uint8_t { kStream, kUnary, kRing };
enum class TransferKind : uint8_t { kStatistics, kGradient, kAnswer, kFactors };

// Receives the notifications about payloads in transit. Observer has the rules for these calls.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  // Payload bytes that workers sent to this process, or it sent to them, retransmissions included.
  virtual void OnReceived(TransferPath path, TransferKind kind, int64_t bytes) {}
  virtual void OnSent(TransferPath path, TransferKind kind, int64_t bytes) {}
  // `took` is the time from the first frame of a contribution to its acknowledgement or refusal.
  virtual void OnReceive(absl::Duration took) {}
  // `took` is the time from when an answer waits to be written to a stream until the transport has taken its last
  // frame.
  virtual void OnReply(absl::Duration took) {}
  // A worker's stream has begun (`open`) or ended.
  virtual void OnStream(bool open) {}
};

}  // namespace precondor
