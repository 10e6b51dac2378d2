// SPDX-License-Identifier: Apache-2.0
// One worker's statistics or gradient of one (step, layer).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/answer_sink.h"
#include "kernels/base/session_spec.h"
#include "precondor/v1/common.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/slot_table.h"

namespace precondor {

class RegionSlots;

// A contribution within its worker; with session, epoch, rank and incarnation it is the key on the wire.
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

// What the shard gives a step's answer to, once all ranks have sent it.
inline bool SealsAnswer(v1::FrameKind kind) { return kind == v1::FRAME_KIND_GRADIENT || kind == v1::FRAME_KIND_PULL; }
// What is done with its RESULT, and not before.
inline bool HasResult(v1::FrameKind kind) { return SealsAnswer(kind) || kind == v1::FRAME_KIND_FETCH; }

// One worker's statistics, gradient or request of one (step, layer), encoded. Sent as often as it takes, always the
// same bytes.
struct Contribution {
  ContributionId id;
  Mode mode = Mode::kSecondOrder;
  uint64_t samples = 0;
  bool abstain = false;
  std::vector<v1::TensorHeader> tensors;
  absl::Span<const uint8_t> payload;
  std::shared_ptr<const void> payload_owner;     // keeps `payload` readable
  bool borrowed = false;                         // it is the caller's memory
  std::shared_ptr<AnswerSink> result;            // of what has a RESULT
  absl::Time deadline = absl::InfiniteFuture();  // for its answer
  uint64_t factor_version = 0;                   // of a RESUME
  // A gradient in a slot of a shared region, which is its own until it is answered, has no `payload`. `make_inline`
  // gives the same gradient with one, for when the region is gone; it waits for the gradient's device.
  std::shared_ptr<RegionSlots> region;
  wire::Slot slot;
  std::function<absl::StatusOr<std::shared_ptr<const Contribution>>()> make_inline;
};

}  // namespace precondor
