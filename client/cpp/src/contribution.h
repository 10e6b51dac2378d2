// SPDX-License-Identifier: Apache-2.0
// A contribution, one worker's statistics, gradient or request for one (step, layer), and the interface that receives
// its answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/gradient_part.h"
#include "kernels/base/session_spec.h"
#include "precondor/client.h"
#include "precondor/v1/common.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/frame_codec.h"
#include "proto/wire/slot_table.h"
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

class RegionSlots;

// Identifies a contribution within its worker. With session, epoch, rank and incarnation it is the key on the wire.
struct ContributionId {
  v1::FrameKind kind = v1::FRAME_KIND_UNSPECIFIED;  // STATISTICS, GRADIENT, PULL, FETCH or RESUME
  uint64_t step = 0;
  uint32_t layer = 0;
  bool operator==(const ContributionId&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const ContributionId& id) {
    return H::combine(std::move(h), static_cast<int>(id.kind), id.step, id.layer);
  }
};

// True for kinds that the shard answers once all ranks have sent theirs for the step.
inline bool SealsAnswer(v1::FrameKind kind) { return kind == v1::FRAME_KIND_GRADIENT || kind == v1::FRAME_KIND_PULL; }
// True for kinds that end with a RESULT.
inline bool HasResult(v1::FrameKind kind) { return SealsAnswer(kind) || kind == v1::FRAME_KIND_FETCH; }

// One encoded contribution. It may be sent several times, always with equal bytes.
struct Contribution {
  ContributionId id;
  Mode mode = Mode::kSecondOrder;
  uint64_t samples = 0;
  bool abstain = false;
  std::vector<v1::TensorHeader> tensors;
  std::vector<GradientPart> parts = {};  // SHARDED
  absl::Span<const uint8_t> payload;
  std::shared_ptr<const void> payload_owner;     // keeps `payload` readable
  bool borrowed = false;                         // `payload` is the caller's memory
  std::shared_ptr<AnswerSink> result;            // receives the RESULT, for kinds that have one
  bool may_wait = false;                         // for a next one, to share its message
  absl::Time deadline = absl::InfiniteFuture();  // for the answer
  uint64_t factor_version = 0;                   // for RESUME only
  std::optional<uint64_t> next_step = {};        // for RESUME only: first step whose answer the rank lacks
  // Set for a gradient in a slot of a shared region, which has no `payload` and owns the slot until its answer.
  // `make_inline` returns an equal contribution with a payload, for use after the region has ended. It blocks until the
  // gradient's device has copied the gradient.
  std::shared_ptr<RegionSlots> region;
  wire::Slot slot;
  std::function<absl::StatusOr<std::shared_ptr<const Contribution>>()> make_inline;
};

}  // namespace precondor
