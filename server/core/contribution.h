// SPDX-License-Identifier: Apache-2.0
// What workers hand to a shard and what it hands back, as core sees them: no protobuf, no sockets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/dtype.h"
#include "kernels/base/session_spec.h"
#include "server/core/device_payload.h"

namespace precondor {

// kPull: where workers have factors themselves (WorkersPrecondition), what takes the gradient's place at a statistic
// step; it carries nothing.
enum class ContributionKind : uint8_t { kStatistics = 1, kGradient = 2, kPull = 3 };

// Identity of a contribution. Two with equal keys and kind are the same one sent twice.
struct ContributionKey {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  uint32_t rank = 0;
  uint64_t incarnation = 0;
  bool operator==(const ContributionKey&) const = default;
};

// Type, shape and scale of one tensor in a payload (as on the wire: value = element * scale).
struct TensorDesc {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  float scale = 1.0f;
};

// A contribution that counts, as it is kept until it is reduced: the payload as it came takes a fraction of what it
// takes decoded.
struct StagedContribution {
  uint64_t samples = 0;
  Payload bytes = {};                                   // statistics: a, then g; or a gradient
  std::array<float, 2> scales = {1, 1};                 // of a and g; or of the gradient
  std::array<int64_t, 2> rows = {0, 0};                 // of a and g as COVARIANCE has them; 0: packed
  std::shared_ptr<const DevicePayload> on_device = {};  // a gradient's, in the place of `bytes`
  bool whole = false;                                   // a gradient in f32 that is the average already
};

struct ContributionHeader {
  ContributionKey key;
  ContributionKind kind = ContributionKind::kStatistics;
  Mode mode = Mode::kSecondOrder;
  uint64_t samples = 1;
  bool abstain = false;  // takes part without a contribution; no tensors
  // Statistics: a [q, d_in], g [q, d_out], or of COVARIANCE each packed or as rows; gradient: [d_out, d_in]; pull:
  // none.
  std::vector<TensorDesc> tensors;
  // A gradient that lies on the backend's device: its payload has no bytes.
  std::shared_ptr<const DevicePayload> on_device = {};
};

// One step's gradient of a layer as a communicator has added it up (docs/collective.md): the contributions of all ranks
// at once, and their average.
struct ReducedGradient {
  uint64_t session_id = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;
  uint32_t layer = 0;
  Mode mode = Mode::kSecondOrder;
  struct Share {
    uint64_t samples = 0;  // 0: no gradient of this rank is in the average
    bool refused = false;  // because it was not finite
  };
  std::vector<Share> shares;  // by rank
  Payload average;            // [d_out, d_in] in f32; of no meaning when a share is missing
};
// Of rank 0, without an incarnation.
inline ContributionKey KeyOf(const ReducedGradient& gradient) {
  return {.session_id = gradient.session_id, .epoch = gradient.epoch, .step = gradient.step, .layer = gradient.layer};
}

// How long the arithmetic of a layer took in a step; zero: none was needed.
struct StageTimes {
  absl::Duration update;
  absl::Duration precondition;
};

// Why an answer is not a preconditioned gradient, for metrics; GradientResult::reason says it to people.
enum class AnswerCause : uint8_t {
  kNone,        // it is one
  kFirstOrder,  // the step's mode
  kNoFactors,   // none yet, or none since a fallback
  kUnchanged,   // of a pull: the step's statistics have not changed the factors
  kFailed,      // the method, the device or an allocation
  kNotFinite,   // the average of the gradients is not
  kAbstained,   // a rank has no gradient, or sent one that is not finite
  kRecovered,   // answered so before the shard, or the session, came back
};
inline constexpr absl::string_view kAnswerCauseNames[] = {"none",   "first_order", "no_factors", "unchanged",
                                                          "failed", "not_finite",  "abstained",  "recovered"};

// The answer to a gradient, or to a pull or fetch: FRAME_KIND_PULL in precondition.proto says what that is.
struct GradientResult {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  double inner_product = 0;  // <D, U>, when the method needs a global scale
  std::string reason;        // for kIdentity and kSkip
  AnswerCause cause = AnswerCause::kNone;
  // A gradient's: [d_out, d_in] in the session's gradient dtype. A pull's: a [k, d_in] and g [k, d_out] in f32, or
  // none, and then `bytes` are LayerState::Save's.
  std::vector<TensorDesc> tensors;
  std::shared_ptr<const Payload> bytes;  // shared by all askers; null for kSkip, and where a pull has nothing to tell
  // In the place of `bytes`: a gradient's answer that is on the device, [d_out, d_in] in f32.
  std::shared_ptr<const DeviceAnswer> on_device = {};
  StageTimes took = {};  // for traces
  int64_t payload_bytes() const {
    if (on_device != nullptr) return on_device->bytes();
    return bytes == nullptr ? 0 : static_cast<int64_t>(bytes->size());
  }
};
// The result with `bytes` where it is on the device. Errors: those of DeviceAnswer::Download.
absl::StatusOr<GradientResult> OnHost(GradientResult result);

// Called exactly once, from any thread, never under a lock of core.
// Ack: true when it was a repetition that was not counted again.
using AckFn = std::function<void(absl::StatusOr<bool> duplicate)>;
using ResultFn = std::function<void(absl::StatusOr<GradientResult>)>;

}  // namespace precondor
