// SPDX-License-Identifier: Apache-2.0
// What server/rpc and server/plane tell of payloads on their way.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace precondor {

// How a payload travels between a worker and this process: frames of a stream, a unary call, a ring in the memory of a
// device, or a communicator.
enum class TransferPath : uint8_t { kStream, kUnary, kRing, kCollective };
enum class TransferKind : uint8_t { kStatistics, kGradient, kAnswer, kFactors };

// See Observer for how the calls come.
class TransferObserver {
 public:
  virtual ~TransferObserver() = default;
  // Payload bytes that workers sent to this process, or it sent to them, retransmissions included.
  virtual void OnReceived(TransferPath path, TransferKind kind, int64_t bytes) {}
  virtual void OnSent(TransferPath path, TransferKind kind, int64_t bytes) {}
  // From the first frame of a contribution to its acknowledgement or refusal.
  virtual void OnReceive(absl::Duration took) {}
  // From the time that an answer waits to be written to a stream until the transport has taken its last frame.
  virtual void OnReply(absl::Duration took) {}
  // A session's ranks and this shard have a communicator for its gradients, or none any more; one has ended before its
  // epoch, and no rank had left.
  virtual void OnDataPlane(absl::string_view train_job, bool joined) {}
  virtual void OnDataPlaneFailure(absl::string_view train_job) {}
};

}  // namespace precondor
