// SPDX-License-Identifier: Apache-2.0
// A contribution: one worker's statistics, gradient or request for one (step, layer).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "client/cpp/src/answer_sink.h"
#include "kernels/base/gradient_part.h"
#include "kernels/base/session_spec.h"
#include "precondor/v1/common.pb.h"
#include "precondor/v1/precondition.pb.h"
#include "proto/wire/slot_table.h"

namespace precondor {

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
