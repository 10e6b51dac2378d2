// SPDX-License-Identifier: Apache-2.0
// The contributions of workers and the answers of a shard in the form that core uses, without protobuf and sockets.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "kernels/backend.h"
#include "kernels/base/dtype.h"
#include "kernels/base/gradient_part.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"
#include "kernels/device_plane.h"

namespace precondor {

// Host bytes that one owner fills and then moves to another.
using Payload = std::vector<uint8_t>;

// A gradient that its worker has written to memory of the backend's device. The worker does not change it before it has
// the answer.
struct DevicePayload {
  ConstMatrixView values;  // [d_out, d_in]
  PayloadFacts facts;
  std::shared_ptr<const void> memory;  // keeps the memory allocated
  int64_t bytes() const { return values.size() * static_cast<int64_t>(sizeof(float)); }
};

// An answer that stays in device memory while ranks may ask for it. Thread-safe. Must not outlive its backend.
class DeviceAnswer {
 public:
  DeviceAnswer(Backend& backend, DeviceMatrix matrix) : backend_(backend), matrix_(std::move(matrix)) {}
  ConstMatrixView view() const { return matrix_.view(); }
  int64_t bytes() const { return view().size() * static_cast<int64_t>(sizeof(float)); }
  // Returns its f32 elements in wire form. Returns the backend's errors.
  absl::StatusOr<std::shared_ptr<const Payload>> Download() const {
    // Heap blocks are aligned for f32, and the wire's byte order is the host's.
    Payload host(static_cast<size_t>(bytes()));
    const ConstMatrixView from = view();
    const absl::Status status =
        backend_.Download(from, MatrixView(reinterpret_cast<float*>(host.data()), from.rows, from.cols));
    if (!status.ok()) return status;
    return std::make_shared<const Payload>(std::move(host));
  }

 private:
  Backend& backend_;
  const DeviceMatrix matrix_;
};

// kPull takes the gradient's place at a statistic step if workers have factors themselves (WorkersPrecondition). It has
// no payload.
enum class ContributionKind : uint8_t { kStatistics = 1, kGradient = 2, kPull = 3 };

// Identity of a contribution. Two contributions with equal keys and kinds are one contribution that was sent twice.
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

// A contribution that counts, as it is kept until it is reduced. Its payload stays encoded, because that takes a
// fraction of the decoded size.
struct StagedContribution {
  uint64_t samples = 0;
  Payload bytes = {};                                   // statistics: a, then g; or a gradient
  std::array<float, 2> scales = {1, 1};                 // of a and g; or of the gradient
  std::array<int64_t, 2> rows = {0, 0};                 // rows of a and g with COVARIANCE; 0 means packed
  std::shared_ptr<const DevicePayload> on_device = {};  // a gradient in device memory, instead of `bytes`
  std::vector<GradientPart> parts = {};                 // SHARDED: the parts of the gradient in `bytes`
};

// A rank whose answers for a layer are from another shard generation tells what it has; see ShardDataPlane::Resume.
struct RankResume {
  // `step` is the first step whose gradient the rank sends or repeats.
  ContributionKey key;
  uint64_t factor_version = 0;  // of its last answer; 0 if that step was in first order
  uint64_t next_step = 0;       // first step whose answer it lacks
  bool begins = false;          // another process has taken the rank over and begins with `key.step`
};

struct ContributionHeader {
  ContributionKey key;
  ContributionKind kind = ContributionKind::kStatistics;
  Mode mode = Mode::kSecondOrder;
  uint64_t samples = 1;
  bool abstain = false;  // takes part without a contribution; no tensors
  // Statistics: a [q, d_in], g [q, d_out], or of COVARIANCE each packed or as rows; gradient: [d_out, d_in], or in
  // SHARDED [1, SentElements(parts)] if that is not 0; pull: none.
  std::vector<TensorDesc> tensors;
  std::vector<GradientPart> parts = {};  // of a gradient in SHARDED
  // Set for a gradient in memory of the backend's device. Its payload has no bytes.
  std::shared_ptr<const DevicePayload> on_device = {};
};

// Time that the arithmetic of a layer took in a step; zero if none was needed.
struct StageTimes {
  absl::Duration update;
  absl::Duration precondition;
};

// Why an answer is not a preconditioned gradient, for metrics. GradientResult::reason is the text for people.
enum class AnswerCause : uint8_t {
  kNone,        // the answer is a preconditioned gradient
  kFirstOrder,  // the step's mode
  kNoFactors,   // none yet
  kUnchanged,   // pull: the step's statistics have not changed the factors
  kFailed,      // the method, the device or an allocation
  kNotFinite,   // the average of the gradients is not finite
  kAbstained,   // a rank has no gradient, or sent one that is not finite
  kRecovered,   // the answer was decided before the shard, or the session, came back
};
inline constexpr absl::string_view kAnswerCauseNames[] = {"none",   "first_order", "no_factors", "unchanged",
                                                          "failed", "not_finite",  "abstained",  "recovered"};

// The answer to a gradient, pull or fetch. FRAME_KIND_PULL in precondition.proto describes the answer to the last two.
struct GradientResult {
  Decision decision = Decision::kIdentity;
  uint64_t factor_version = 0;
  double inner_product = 0;  // <D, U>, when the method needs a global scale
  std::string reason;        // for kIdentity and kSkip
  AnswerCause cause = AnswerCause::kNone;
  // For a gradient: [d_out, d_in] in the session's gradient dtype. For a pull: a [k, d_in] and g [k, d_out] in f32; or
  // no tensors, and then `bytes` are those of LayerState::Save.
  std::vector<TensorDesc> tensors;
  std::shared_ptr<const Payload> bytes;  // shared by all requests; null if there is no payload
  // The answer to a gradient in device memory, [d_out, d_in] in f32, instead of `bytes`.
  std::shared_ptr<const DeviceAnswer> on_device = {};
  StageTimes took = {};  // for traces
  int64_t payload_bytes() const {
    if (on_device != nullptr) return on_device->bytes();
    return bytes == nullptr ? 0 : static_cast<int64_t>(bytes->size());
  }
};
// Returns the result with `bytes` instead of `on_device`. Returns the errors of DeviceAnswer::Download.
absl::StatusOr<GradientResult> OnHost(GradientResult result);

// Callbacks are called exactly once, from any thread, never under a lock of core. AckFn gets true for a repetition,
// which is not counted again.
using AckFn = std::function<void(absl::StatusOr<bool> duplicate)>;
using ResultFn = std::function<void(absl::StatusOr<GradientResult>)>;

}  // namespace precondor
