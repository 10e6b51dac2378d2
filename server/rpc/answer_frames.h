// SPDX-License-Identifier: Apache-2.0
// Functions that push an answer without payload to a FrameQueue. Thread-safe.
#pragma once

#include "absl/status/status.h"

#include "precondor/v1/precondition.pb.h"
#include "server/rpc/frame_queue.h"

namespace precondor::rpc {

// Pushes an ERROR frame with `status` for the contribution.
void PushError(FrameQueue& queue, const v1::FrameHeader& contribution, const absl::Status& status);
// Pushes an ACK frame. `duplicate` says that the shard already had the contribution.
void PushAck(FrameQueue& queue, const v1::FrameHeader& contribution, bool duplicate, uint64_t updates_lost = 0);

}  // namespace precondor::rpc
