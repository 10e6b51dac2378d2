// SPDX-License-Identifier: Apache-2.0
// Interface that receives the answer to a contribution as it arrives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "precondor/client.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

// Receives one answer: its frames, then its outcome. Thread-safe. Callers hold no link's lock, except for Restart.
// Complete and Fail may run the code that waits for the outcome.
class AnswerSink {
 public:
  virtual ~AnswerSink() = default;

  // Begins a RESULT that is not SKIP, at its first frame. Returns INVALID_ARGUMENT if the tensors or the size cannot be
  // those of the answer.
  virtual absl::Status Begin(absl::Span<const wire::TensorFormat> tensors, uint64_t payload_bytes) = 0;
  // Adds bytes [offset, offset + chunk.size()). Returns INVALID_ARGUMENT if they do not follow the bytes received so
  // far. Once there is an outcome, ignores them and returns OK.
  virtual absl::Status Append(uint64_t offset, const wire::ReceivedBytes& chunk) = 0;
  // True if every byte that Begin announced has been received.
  virtual bool HasAllBytes() const = 0;
  // Takes a whole RESULT, [d_out, d_in], from the contribution's slot of a shared region. `outstanding` is the number
  // of slots whose answers have not been taken. Calls `done`, on any thread, when the device has copied the answer;
  // `done` keeps this object and the slot's memory.
  virtual void TakeFromSlot(const float* /*values*/, size_t /*outstanding*/,
                            std::function<void(const absl::Status&)> done) {
    done(absl::InvalidArgumentError("result: expected bytes, got one in a ring"));
  }
  // Discards the bytes received so far.
  virtual void Restart() = 0;

  // Sets the outcome. The first outcome counts; returns false if there is one already.
  virtual bool Complete(Preconditioned outcome) = 0;
  virtual bool Fail(absl::Status status) = 0;
  // True if there is an outcome and no other thread uses the caller's memory.
  virtual bool ready() const = 0;
};

}  // namespace precondor
