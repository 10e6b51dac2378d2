// SPDX-License-Identifier: Apache-2.0
// Description of a session: the vocabulary that client, wire, coordinator and shards share
// (docs/develop/architecture.md). Plain values. ValidateSessionSpec checks them once; the rest of the code trusts them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"
#include "kernels/base/fields.h"

namespace precondor {

enum class FallbackPolicy : uint8_t { kNever = 1, kLossRate = 2, kAtStep = 4 };

// When a session falls back to first order (MKOR-H; docs/use/methods/mkor_h.md); server/policy/fallback.h has the
// rules. "Counted steps" are the steps that were not skipped and whose loss was finite.
struct FallbackConfig {
  FallbackPolicy policy = FallbackPolicy::kNever;
  // AT_STEP: the first step in first order. AT_STEP requires it; other policies ignore it.
  std::optional<uint64_t> at_step = std::nullopt;

  // Trend of the smoothed loss. Every policy computes it; LOSS_RATE decides by it.
  double rate_decay = 0.99;     // weight of the past in the smoothed decrease per step, in [0, 1)
  double lr_jump = 0.1;         // relative change of the learning rate in one step that begins a new phase, positive
  int32_t min_steps = 200;      // counted steps of a phase before the first decision, at least 1
  double beta = 0.1;            // "slow" means below this share of the phase's mean decrease per step, in [0, 1]
  int32_t patience_steps = 50;  // consecutive counted steps that must be slow before the fallback, at least 1

  bool operator==(const FallbackConfig&) const = default;
};
PRECONDOR_FIELDS(FallbackConfig, policy, at_step, rate_decay, lr_jump, min_steps, beta, patience_steps)

// Returns InvalidArgument with the field ("fallback.beta"), the expected values and the actual value.
absl::Status ValidateFallbackConfig(const FallbackConfig& config);

// "NEVER", "LOSS_RATE", "AT_STEP"; for messages, logs and metrics.
absl::string_view FallbackPolicyName(FallbackPolicy policy);

enum class Mode : uint8_t { kSecondOrder = 1, kFirstOrder = 2 };
// Which ranks send gradients, and where these are preconditioned; docs/develop/protocol.md. With kPullFactors and
// kReplay gradients stay with the workers, which hold the factors too (WorkersPrecondition).
enum class ExchangeMode : uint8_t { kDirect = 1, kDelegate = 2, kPullFactors = 3, kReplay = 4, kSharded = 5 };
// What workers send as statistics. kCovariance: each side is the mean of x x' over the worker's rows or, if that is
// smaller, the rows themselves; only for methods with StatisticsForm::kCovariances (kernels/base/method_traits.h).
enum class StatisticsKind : uint8_t { kMean = 1, kPerWorkerMean = 2, kSigned = 3, kCovariance = 4 };
// The decision of a sealed plan for one (epoch, step, layer). kSkip: a contributor had no usable gradient (AMP skip or
// non-finite), so no worker gets one and every replica skips the step.
enum class Decision : uint8_t { kPreconditioned = 1, kIdentity = 2, kSkip = 3 };

// One weight matrix W [d_out, d_in]. With has_bias, the last of the d_in columns is the folded bias.
struct LayerSpec {
  std::string name;
  int64_t d_out = 0;
  int64_t d_in = 0;
  bool has_bias = false;
  // Dimensions of the parameter tensor whose row-major elements are those of W; their product is d_out d_in. Empty
  // means W's own dimensions. Only methods with a factor for each dimension use it; W is what travels.
  std::vector<int64_t> shape = {};
  bool operator==(const LayerSpec&) const = default;
};
PRECONDOR_FIELDS(LayerSpec, name, d_out, d_in, has_bias, shape)

// A method's name and options, as the registry (kernels/methods/registry.h) interprets them. An option that is left out
// has the method's default. Option names are those of docs/use/methods/<name>.md.
using OptionValue = std::variant<bool, double, std::string>;
struct MethodConfig {
  std::string name = "mkor";
  std::map<std::string, OptionValue> options;
  bool operator==(const MethodConfig&) const = default;
};
PRECONDOR_FIELDS(MethodConfig, name, options)

// Layers with another method, or other statistics, than the rest of their session.
struct LayerMethod {
  MethodConfig method;
  StatisticsKind statistics = StatisticsKind::kSigned;
  std::vector<uint32_t> layers;  // indices in the session's layer table, ascending; at least one
  bool operator==(const LayerMethod&) const = default;
};
PRECONDOR_FIELDS(LayerMethod, method, statistics, layers)

// Messages, records and Python's dictionaries have fields of the same names.
struct SessionSpec {
  std::string name;        // unique on a coordinator, [A-Za-z0-9._-]{1,128}
  uint64_t seed = 0;       // key of every random choice of the session
  int32_t world_size = 1;  // workers, 1 ... 65536
  ExchangeMode exchange = ExchangeMode::kDirect;
  StatisticsKind statistics = StatisticsKind::kSigned;
  int32_t sketches = 0;   // q per worker, 1 ... 16; 0 means ceil(16 / world_size). SIGNED only
  int32_t inv_freq = 10;  // statistic steps: step % inv_freq == 0 or step < warmup_steps
  int32_t warmup_steps = 10;
  DType statistics_dtype = DType::kF16;
  DType gradient_dtype = DType::kF32;
  MethodConfig method;
  FallbackConfig fallback;
  std::vector<LayerSpec> layers;
  std::vector<LayerMethod> layer_methods = {};  // exceptions to `method` and `statistics`; each layer in at most one
  std::vector<uint32_t> delegates = {};         // see DelegateRank
  bool operator==(const SessionSpec&) const = default;
};
PRECONDOR_FIELDS(SessionSpec, name, seed, world_size, exchange, statistics, sketches, inv_freq, warmup_steps,
                 statistics_dtype, gradient_dtype, method, fallback, layers, layer_methods, delegates)

// Limits of a spec, chosen so that sizes fit 64 bits with room to spare.
inline constexpr int64_t kMaxDimension = int64_t{1} << 20;
inline constexpr int64_t kMaxLayers = 1 << 16;
inline constexpr int64_t kMaxTensorDims = 8;
inline constexpr int64_t kMaxLayerMethods = 256;  // MethodOf and StatisticsOf search all of them
inline constexpr int32_t kMaxWorldSize = 1 << 16;
inline constexpr int32_t kMaxSketches = 16;

// Returns InvalidArgument with the field (for a layer its index and name), the expected values and the actual value.
// Checks everything but the methods and what they support in the session, which MethodSet checks (kernels/methods).
absl::Status ValidateSessionSpec(const SessionSpec& spec);

// Returns `shape`, or {d_out, d_in} if `shape` is empty.
std::vector<int64_t> TensorDims(const LayerSpec& layer);

// Returns the first field in which two specs differ, with both values, for messages; empty if they are equal.
std::string DescribeDifference(const SessionSpec& have, const SessionSpec& want);

// Returns whether workers precondition gradients with their own copy of the factors: REPLAY and PULL_FACTORS.
inline bool WorkersPrecondition(const SessionSpec& spec) {
  return spec.exchange == ExchangeMode::kReplay || spec.exchange == ExchangeMode::kPullFactors;
}

// Returns whether workers send statistics at `step`, for the layers whose method takes any (TakesStatistics in
// kernels/methods/registry.h).
bool IsStatisticStep(const SessionSpec& spec, uint64_t step);

// Return the method and the statistics of one layer, exceptions included. Precondition: the layer exists.
const MethodConfig& MethodOf(const SessionSpec& spec, int64_t layer);
StatisticsKind StatisticsOf(const SessionSpec& spec, int64_t layer);

// Returns whether some layer's statistics are SIGNED.
bool UsesSketches(const SessionSpec& spec);
// Returns q of SIGNED: `sketches`, or its default if that is 0.
int32_t SketchesPerWorker(const SessionSpec& spec);

// Number of vectors per side that one worker sends for a layer at a statistic step: 1 for the means, q for SIGNED; 0
// for COVARIANCE.
int64_t VectorsPerWorker(const SessionSpec& spec, int64_t layer);

// Number of vectors per side of one sealed statistic step: 1 for MEAN, world_size * VectorsPerWorker otherwise. For
// COVARIANCE the largest number of rows that a merged side can have.
int64_t VectorsPerStep(const SessionSpec& spec, int64_t layer);

// A side of COVARIANCE is either the lower triangle of a d x d matrix, packed in the order of Backend::PackLower: [1,
// PackedElements(d)]; or rows [n, d] with n <= MaxRows(d), which are fewer elements than that.
inline int64_t PackedElements(int64_t d) { return d * (d + 1) / 2; }
inline int64_t MaxRows(int64_t d) { return (PackedElements(d) - 1) / d; }

// Returns the number of elements of one worker's statistics of a layer at a statistic step: VectorsPerWorker (d_in +
// d_out), or the maximum for COVARIANCE, of which few samples are sent as rows.
int64_t StatisticsElements(const SessionSpec& spec, int64_t layer);

// Returns the rank that sends the gradient of layer `layer` in DELEGATE: its entry in `delegates`, or layer %
// world_size if there are none. A session keeps its delegates, also when its layers move to other shards.
int32_t DelegateRank(const SessionSpec& spec, int64_t layer);

// Stable names, such as "SECOND_ORDER", "DIRECT", "SIGNED" and "PRECONDITIONED".
absl::string_view ModeName(Mode mode);
absl::string_view ExchangeModeName(ExchangeMode exchange);
absl::string_view StatisticsKindName(StatisticsKind kind);
absl::string_view DecisionName(Decision decision);
// The same by type, for the fields of a session. "UNKNOWN" for a number that is not used.
inline absl::string_view NameOf(ExchangeMode value) { return ExchangeModeName(value); }
inline absl::string_view NameOf(StatisticsKind value) { return StatisticsKindName(value); }
inline absl::string_view NameOf(FallbackPolicy value) { return FallbackPolicyName(value); }
inline absl::string_view NameOf(DType value) { return DTypeName(value); }

}  // namespace precondor
