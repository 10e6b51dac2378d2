// SPDX-License-Identifier: Apache-2.0
// What a session is: the vocabulary shared by client, wire, coordinator and shards (docs/architecture.md).
// Plain values; validated once by ValidateSessionSpec, after which the rest of the code trusts them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

#include "kernels/base/dtype.h"
#include "kernels/base/fallback_config.h"

namespace precondor {

enum class Mode : uint8_t { kSecondOrder = 1, kFirstOrder = 2 };
// Who sends gradients and who has them preconditioned where; docs/protocol.md. In kPullFactors and kReplay they stay
// with the workers, who have the factors too (WorkersPrecondition).
enum class ExchangeMode : uint8_t { kDirect = 1, kDelegate = 2, kPullFactors = 3, kReplay = 4 };
// kCovariance: each side as the mean of x x' over the worker's rows, or, where that is smaller, as rows themselves; for
// methods that take them (StatisticsForm::kCovariances in kernels/base/method_traits.h).
enum class StatisticsKind : uint8_t { kMean = 1, kPerWorkerMean = 2, kSigned = 3, kCovariance = 4 };
// What becomes of a session when a shard is lost. kWait: the job waits until it is back, and goes on as if nothing had
// happened. kDegrade: its layers begin anew on other shards, without their factors; the job waits until the loss is
// noticed.
enum class ShardLossPolicy : uint8_t { kWait = 1, kDegrade = 2 };
// Which way gradients and answers take. kCollective: the ranks and each shard sum and send them as ranks of one
// communicator, as long as there is one; docs/collective.md. Everything else goes over gRPC all the same.
enum class DataPlane : uint8_t { kGrpc = 1, kCollective = 2 };
// What a sealed plan says of one (epoch, step, layer). kSkip: a contributor had no usable gradient (AMP skip or
// non-finite), so no worker gets one and every replica skips the step.
enum class Decision : uint8_t { kPreconditioned = 1, kIdentity = 2, kSkip = 3 };

// One weight matrix W [d_out, d_in]. With has_bias the last of the d_in columns is the folded bias.
struct LayerSpec {
  std::string name;
  int64_t d_out = 0;
  int64_t d_in = 0;
  bool has_bias = false;
  // The dimensions of the tensor that W is, of which its elements are the same row-major sequence: d_out d_in in all.
  // For methods with a factor for each dimension; what travels is W. Empty: W's own.
  std::vector<int64_t> shape = {};
  bool operator==(const LayerSpec&) const = default;
};

// A method by name with its options, as the registry (kernels/methods/registry.h) understands them. An option
// left out has the method's default. Names are those of docs/methods/<name>.md.
using OptionValue = std::variant<bool, double, std::string>;
struct MethodConfig {
  std::string name = "mkor";
  std::map<std::string, OptionValue> options;
  bool operator==(const MethodConfig&) const = default;
};

// Layers that have another method, or other statistics, than the rest of their session.
struct LayerMethod {
  MethodConfig method;
  StatisticsKind statistics = StatisticsKind::kSigned;
  std::vector<uint32_t> layers;  // places in the session's layer table, ascending; at least one
  bool operator==(const LayerMethod&) const = default;
};

struct SessionSpec {
  std::string name;        // unique on a coordinator, [A-Za-z0-9._-]{1,128}
  uint64_t seed = 0;       // keys every random choice of the session
  int32_t world_size = 1;  // workers, 1 ... 65536
  ExchangeMode exchange = ExchangeMode::kDirect;
  StatisticsKind statistics = StatisticsKind::kSigned;
  int32_t sketches = 0;   // q per worker, 1 ... 16; 0: ceil(16 / world_size). SIGNED only
  int32_t inv_freq = 10;  // statistic steps: step % inv_freq == 0 or step < warmup_steps
  int32_t warmup_steps = 10;
  int32_t staleness_steps = 0;  // 0: a step uses its own statistics; 1: those before it
  DType statistics_dtype = DType::kF16;
  DType gradient_dtype = DType::kF32;
  MethodConfig method;
  FallbackConfig fallback;
  ShardLossPolicy on_shard_loss = ShardLossPolicy::kWait;
  std::vector<LayerSpec> layers;
  std::vector<LayerMethod> layer_methods = {};  // exceptions to `method` and `statistics`; each layer in one at most
  DataPlane data_plane = DataPlane::kGrpc;
  bool operator==(const SessionSpec&) const = default;
};

// Limits that a spec is held to, so that sizes fit 64 bits with room to spare.
inline constexpr int64_t kMaxDimension = int64_t{1} << 20;
inline constexpr int64_t kMaxLayers = 1 << 16;
inline constexpr int64_t kMaxTensorDims = 8;
inline constexpr int64_t kMaxLayerMethods = 256;  // each question about a layer's method looks through them
inline constexpr int32_t kMaxWorldSize = 1 << 16;
inline constexpr int32_t kMaxSketches = 16;
inline constexpr int32_t kMaxCollectiveWorkers = 255;  // of a session with data_plane COLLECTIVE

// InvalidArgument that names the field (for a layer its index and name), what was expected and what came.
// Checks everything but the methods and what they can do in the session, which MethodSet checks (kernels/methods).
absl::Status ValidateSessionSpec(const SessionSpec& spec);

// `shape`, or {d_out, d_in} where there is none.
std::vector<int64_t> TensorDims(const LayerSpec& layer);

// The first field in which two specs differ, with both values, for messages; empty when they are equal.
std::string DescribeDifference(const SessionSpec& have, const SessionSpec& want);

// Whether workers precondition themselves, with factors of their own: REPLAY and PULL_FACTORS.
inline bool WorkersPrecondition(const SessionSpec& spec) {
  return spec.exchange == ExchangeMode::kReplay || spec.exchange == ExchangeMode::kPullFactors;
}

// True when workers send statistics at `step`, of the layers whose method takes any (TakesStatistics in
// kernels/methods/registry.h).
bool IsStatisticStep(const SessionSpec& spec, uint64_t step);

// What holds for one layer. The layer exists.
const MethodConfig& MethodOf(const SessionSpec& spec, int64_t layer);
StatisticsKind StatisticsOf(const SessionSpec& spec, int64_t layer);

// Whether some layer's statistics are SIGNED.
bool UsesSketches(const SessionSpec& spec);
// SIGNED's q: `sketches`, or what it is by default.
int32_t SketchesPerWorker(const SessionSpec& spec);

// Vectors per side that one worker sends of a layer at a statistic step: 1 for the means, q for SIGNED; 0 for
// COVARIANCE.
int64_t VectorsPerWorker(const SessionSpec& spec, int64_t layer);

// Vectors per side of one sealed statistic step: 1 for MEAN, world_size * VectorsPerWorker otherwise; for COVARIANCE
// the most rows that a side is merged to.
int64_t VectorsPerStep(const SessionSpec& spec, int64_t layer);

// A side of COVARIANCE is the lower triangle of a d x d matrix, packed in Backend::PackLower's order: [1,
// PackedElements(d)]; or rows [n, d], n <= MaxRows(d), which are fewer elements than that.
inline int64_t PackedElements(int64_t d) { return d * (d + 1) / 2; }
inline int64_t MaxRows(int64_t d) { return (PackedElements(d) - 1) / d; }

// Rank that sends layer `layer`'s gradient in DELEGATE: layer % world_size.
int32_t DelegateRank(const SessionSpec& spec, int64_t layer);

// Stable names: "SECOND_ORDER", "DIRECT", "SIGNED", "PRECONDITIONED" ...
absl::string_view ModeName(Mode mode);
absl::string_view ExchangeModeName(ExchangeMode exchange);
absl::string_view StatisticsKindName(StatisticsKind kind);
absl::string_view ShardLossPolicyName(ShardLossPolicy policy);
absl::string_view DataPlaneName(DataPlane plane);
absl::string_view DecisionName(Decision decision);

}  // namespace precondor
