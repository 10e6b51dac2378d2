// SPDX-License-Identifier: Apache-2.0
// Where the answer to a contribution goes, as it arrives.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "precondor/client.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

// Thread-safe. Called without a link's lock, except Restart; Complete and Fail may call the code that waits.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;

  // First frame of a RESULT that is not SKIP. InvalidArgument unless tensors and size are what can come.
  virtual absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) = 0;
  // Bytes [offset, offset + chunk.size()). InvalidArgument unless they follow what has come. After an outcome is
  // known: nothing, OK.
  virtual absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) = 0;
  // True when every byte that Begin announced is there.
  virtual bool HasAllBytes() const = 0;
  // All of a RESULT that lies in the contribution's slot of a shared region, [d_out, d_in]. Waits for the device.
  virtual absl::Status TakeFromSlot(const float* values) {
    return absl::InvalidArgumentError("result: expected bytes, got one in a ring");
  }
  // Forgets what has come.
  virtual void Restart() = 0;

  // The first outcome counts; false when there was one already.
  virtual bool Complete(Preconditioned outcome) = 0;
  virtual bool Fail(absl::Status status) = 0;
  // There is an outcome, and no other thread uses the caller's memory any more.
  virtual bool ready() const = 0;
};

}  // namespace precondor
