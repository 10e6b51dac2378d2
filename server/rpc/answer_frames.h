// SPDX-License-Identifier: Apache-2.0
// Frames without payload that answer a contribution. Thread-safe.
#pragma once

#include "absl/status/status.h"

#include "precondor/v1/precondition.pb.h"
#include "server/rpc/frame_queue.h"

namespace precondor::rpc {

void PushError(FrameQueue& queue, const v1::FrameHeader& contribution, const absl::Status& status);
void PushAck(FrameQueue& queue, const v1::FrameHeader& contribution, bool duplicate);

}  // namespace precondor::rpc
