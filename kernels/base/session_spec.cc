// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/session_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/variant.h"

#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

absl::Status Invalid(absl::string_view field, absl::string_view expected, const absl::AlphaNum& got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", got));
}

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Invalid(field, absl::StrCat(low, " ... ", high), value);
}

// Every caller passes an `ok` that is false for NaN, because it is the result of comparisons that must hold.
absl::Status CheckNumber(absl::string_view field, double value, bool ok, absl::string_view expected) {
  return ok ? absl::OkStatus() : Invalid(field, expected, value);
}

absl::Status CheckName(absl::string_view name) {
  const bool allowed = std::all_of(name.begin(), name.end(),
                                   [](char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-'; });
  if (allowed && !name.empty() && name.size() <= 128) return absl::OkStatus();
  return Invalid("name", "1 ... 128 characters of [A-Za-z0-9._-]",
                 absl::StrCat("\"", Printable(name.substr(0, 128)), "\" (", name.size(), " bytes)"));
}

std::string DimsText(const std::vector<int64_t>& dims) { return absl::StrCat("[", absl::StrJoin(dims, ", "), "]"); }

// Precondition: d_out and d_in are within their bounds.
absl::Status CheckTensor(absl::string_view field, const LayerSpec& layer) {
  if (layer.shape.empty()) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(
      CheckRange(absl::StrCat(field, " shape: dimensions"), layer.shape.size(), 1, kMaxTensorDims));
  if (layer.has_bias) {
    return Invalid(absl::StrCat(field, " shape"), "none with has_bias, whose column is not the tensor's",
                   DimsText(layer.shape));
  }
  const int64_t expected = layer.d_out * layer.d_in;
  int64_t elements = 1;
  for (size_t i = 0; i < layer.shape.size(); ++i) {
    PRECONDOR_RETURN_IF_ERROR(CheckRange(absl::StrCat(field, " shape[", i, "]"), layer.shape[i], 1, kMaxDimension));
    if (elements <= expected) elements *= layer.shape[i];  // at most 2^40 2^20
  }
  if (elements == expected) return absl::OkStatus();
  return Invalid(absl::StrCat(field, " shape"),
                 absl::StrCat("d_out d_in = ", layer.d_out, " x ", layer.d_in, " = ", expected, " elements"),
                 DimsText(layer.shape));
}

absl::Status CheckLayers(const std::vector<LayerSpec>& layers) {
  PRECONDOR_RETURN_IF_ERROR(CheckRange("layers: count", layers.size(), 1, kMaxLayers));
  absl::flat_hash_set<absl::string_view> names;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerSpec& layer = layers[i];
    const std::string field = absl::StrCat("layers[", i, "] \"", Printable(layer.name.substr(0, 64)), "\"");
    if (layer.name.empty() || layer.name.size() > 512) {
      return Invalid(absl::StrCat(field, " name"), "1 ... 512 bytes", layer.name.size());
    }
    if (const std::string printable = Printable(layer.name); printable != layer.name) {
      return Invalid(absl::StrCat(field, " name"), "printable characters", absl::StrCat("\"", printable, "\""));
    }
    if (!names.insert(layer.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(field, ": expected unique names, got this one twice"));
    }
    PRECONDOR_RETURN_IF_ERROR(CheckRange(absl::StrCat(field, " d_out"), layer.d_out, 1, kMaxDimension));
    PRECONDOR_RETURN_IF_ERROR(
        CheckRange(absl::StrCat(field, " d_in"), layer.d_in, layer.has_bias ? 2 : 1, kMaxDimension));
    PRECONDOR_RETURN_IF_ERROR(CheckTensor(field, layer));
  }
  return absl::OkStatus();
}

template <typename Enum>
absl::Status CheckEnum(absl::string_view field, Enum value, Enum last) {
  return CheckRange(field, static_cast<int64_t>(value), 1, static_cast<int64_t>(last));
}

std::string Text(const MethodConfig& method) {
  return absl::StrCat(method.name, "{",
                      absl::StrJoin(method.options, ", ",
                                    [](std::string* out, const auto& option) {
                                      absl::StrAppend(out, option.first, "=");
                                      std::visit([out](const auto& value) { absl::StrAppend(out, value); },
                                                 option.second);
                                    }),
                      "}");
}

std::string Text(const LayerSpec& layer) {
  return absl::StrCat("\"", layer.name, "\" [", layer.d_out, ", ", layer.d_in, "]", layer.has_bias ? " with bias" : "",
                      layer.shape.empty() ? "" : absl::StrCat(" of shape ", DimsText(layer.shape)));
}

std::string Text(const std::vector<uint32_t>& ranks) { return absl::StrCat("[", absl::StrJoin(ranks, ", "), "]"); }
std::string Text(const std::optional<uint64_t>& step) { return step ? absl::StrCat(*step) : "none"; }

template <typename T>
std::string Text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::string(NameOf(value));
  } else {
    return absl::StrCat(value);
  }
}

absl::Status CheckLayerMethods(const SessionSpec& spec) {
  PRECONDOR_RETURN_IF_ERROR(CheckRange("layer_methods: count", spec.layer_methods.size(), 0, kMaxLayerMethods));
  std::vector<bool> taken(spec.layers.size(), false);
  for (size_t i = 0; i < spec.layer_methods.size(); ++i) {
    const LayerMethod& entry = spec.layer_methods[i];
    const std::string field = absl::StrCat("layer_methods[", i, "].");
    PRECONDOR_RETURN_IF_ERROR(
        CheckEnum(absl::StrCat(field, "statistics"), entry.statistics, StatisticsKind::kCovariance));
    if (entry.layers.empty()) return Invalid(absl::StrCat(field, "layers"), "at least one place", "none");
    for (size_t j = 0; j < entry.layers.size(); ++j) {
      const uint32_t layer = entry.layers[j];
      if (layer >= taken.size()) {
        return Invalid(absl::StrCat(field, "layers"), absl::StrCat("places of 0 ... ", taken.size() - 1), layer);
      }
      if (j > 0 && layer <= entry.layers[j - 1]) {
        return Invalid(absl::StrCat(field, "layers"), "ascending places",
                       absl::StrCat(layer, " after ", entry.layers[j - 1]));
      }
      if (taken[layer]) {
        return Invalid(absl::StrCat(field, "layers"), "layers that no earlier entry has",
                       absl::StrCat(layer, " \"", spec.layers[layer].name, "\""));
      }
      taken[layer] = true;
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDelegates(const SessionSpec& spec) {
  if (spec.delegates.empty()) return absl::OkStatus();
  if (spec.exchange != ExchangeMode::kDelegate) {
    return Invalid("delegates", absl::StrCat("none with exchange ", ExchangeModeName(spec.exchange)),
                   spec.delegates.size());
  }
  if (spec.delegates.size() != spec.layers.size()) {
    return Invalid("delegates", absl::StrCat("none, or one for each of ", spec.layers.size(), " layers"),
                   spec.delegates.size());
  }
  for (const uint32_t rank : spec.delegates) {
    if (rank >= static_cast<uint32_t>(spec.world_size)) {
      return Invalid("delegates", absl::StrCat("ranks of 0 ... ", spec.world_size - 1), rank);
    }
  }
  return absl::OkStatus();
}

// Each returns the first difference with both values, or an empty string.
template <typename T>
std::string Difference(const std::string& field, const T& have, const T& want) {
  return have == want ? "" : absl::StrCat(field, ": have ", Text(have), ", got ", Text(want));
}

std::string Difference(const std::string& field, const std::vector<LayerSpec>& have,
                       const std::vector<LayerSpec>& want) {
  if (have.size() != want.size()) return absl::StrCat(field, ": have ", have.size(), ", got ", want.size());
  for (size_t i = 0; i < have.size(); ++i) {
    if (have[i] != want[i]) return Difference(absl::StrCat(field, "[", i, "]"), have[i], want[i]);
  }
  return "";
}

std::string Difference(const std::string& field, const FallbackConfig& have, const FallbackConfig& want) {
  std::string difference;
  ForEachField(
      [&](absl::string_view name, const auto& a, const auto& b) {
        if (difference.empty()) difference = Difference(absl::StrCat(field, ".", name), a, b);
      },
      have, want);
  return difference;
}

// Compares what each layer has, because lists can say the same in several ways.
std::string LayerMethodsDifference(const SessionSpec& have, const SessionSpec& want) {
  for (size_t layer = 0; layer < have.layers.size(); ++layer) {
    if (MethodOf(have, layer) == MethodOf(want, layer) && StatisticsOf(have, layer) == StatisticsOf(want, layer)) {
      continue;
    }
    const auto text = [layer](const SessionSpec& spec) {
      return absl::StrCat(Text(MethodOf(spec, layer)), " ", NameOf(StatisticsOf(spec, layer)));
    };
    return absl::StrCat("layers[", layer, "] \"", have.layers[layer].name, "\": have ", text(have), ", got ",
                        text(want));
  }
  return "";
}

}  // namespace

absl::Status ValidateFallbackConfig(const FallbackConfig& c) {
  if (FallbackPolicyName(c.policy) == "UNKNOWN")
    return Invalid("fallback.policy", "1, 2 or 4", static_cast<int>(c.policy));
  if (c.policy == FallbackPolicy::kAtStep && !c.at_step)
    return Invalid("fallback.at_step", "a step, for AT_STEP", "none");
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("fallback.rate_decay", c.rate_decay, c.rate_decay >= 0 && c.rate_decay < 1, "a number in [0, 1)"));
  PRECONDOR_RETURN_IF_ERROR(
      CheckNumber("fallback.lr_jump", c.lr_jump, c.lr_jump > 0 && c.lr_jump < kInfinity, "a positive number"));
  PRECONDOR_RETURN_IF_ERROR(CheckRange("fallback.min_steps", c.min_steps, 1, 1 << 30));
  PRECONDOR_RETURN_IF_ERROR(CheckNumber("fallback.beta", c.beta, c.beta >= 0 && c.beta <= 1, "a number in [0, 1]"));
  return CheckRange("fallback.patience_steps", c.patience_steps, 1, 1 << 30);
}

absl::string_view FallbackPolicyName(FallbackPolicy policy) {
  switch (policy) {
    case FallbackPolicy::kNever:
      return "NEVER";
    case FallbackPolicy::kLossRate:
      return "LOSS_RATE";
    case FallbackPolicy::kAtStep:
      return "AT_STEP";
  }
  return "UNKNOWN";
}

absl::Status ValidateSessionSpec(const SessionSpec& spec) {
  PRECONDOR_RETURN_IF_ERROR(CheckName(spec.name));
  PRECONDOR_RETURN_IF_ERROR(CheckRange("world_size", spec.world_size, 1, kMaxWorldSize));
  PRECONDOR_RETURN_IF_ERROR(CheckEnum("exchange", spec.exchange, ExchangeMode::kSharded));
  PRECONDOR_RETURN_IF_ERROR(CheckEnum("statistics", spec.statistics, StatisticsKind::kCovariance));
  PRECONDOR_RETURN_IF_ERROR(CheckRange("sketches", spec.sketches, 0, kMaxSketches));
  PRECONDOR_RETURN_IF_ERROR(CheckRange("inv_freq", spec.inv_freq, 1, 1 << 30));
  PRECONDOR_RETURN_IF_ERROR(CheckRange("warmup_steps", spec.warmup_steps, 0, 1 << 30));
  PRECONDOR_RETURN_IF_ERROR(CheckEnum("statistics_dtype", spec.statistics_dtype, DType::kBF16));
  PRECONDOR_RETURN_IF_ERROR(CheckEnum("gradient_dtype", spec.gradient_dtype, DType::kBF16));
  PRECONDOR_RETURN_IF_ERROR(ValidateFallbackConfig(spec.fallback));
  PRECONDOR_RETURN_IF_ERROR(CheckLayers(spec.layers));
  PRECONDOR_RETURN_IF_ERROR(CheckLayerMethods(spec));
  return CheckDelegates(spec);
}

std::vector<int64_t> TensorDims(const LayerSpec& layer) {
  return layer.shape.empty() ? std::vector<int64_t>{layer.d_out, layer.d_in} : layer.shape;
}

std::string DescribeDifference(const SessionSpec& have, const SessionSpec& want) {
  std::string difference;
  ForEachField(
      [&](absl::string_view name, const auto& a, const auto& b) {
        if (!difference.empty()) return;
        if constexpr (std::is_same_v<decltype(a), const std::vector<LayerMethod>&>) {
          difference = LayerMethodsDifference(have, want);
        } else {
          difference = Difference(std::string(name), a, b);
        }
      },
      have, want);
  return difference;
}

bool IsStatisticStep(const SessionSpec& spec, uint64_t step) {
  return step % static_cast<uint64_t>(spec.inv_freq) == 0 || step < static_cast<uint64_t>(spec.warmup_steps);
}

namespace {

const LayerMethod* ExceptionOf(const SessionSpec& spec, int64_t layer) {
  for (const LayerMethod& entry : spec.layer_methods) {
    if (absl::c_binary_search(entry.layers, static_cast<uint32_t>(layer))) return &entry;
  }
  return nullptr;
}

}  // namespace

const MethodConfig& MethodOf(const SessionSpec& spec, int64_t layer) {
  const LayerMethod* exception = ExceptionOf(spec, layer);
  return exception != nullptr ? exception->method : spec.method;
}

StatisticsKind StatisticsOf(const SessionSpec& spec, int64_t layer) {
  const LayerMethod* exception = ExceptionOf(spec, layer);
  return exception != nullptr ? exception->statistics : spec.statistics;
}

bool UsesSketches(const SessionSpec& spec) {
  return spec.statistics == StatisticsKind::kSigned || absl::c_any_of(spec.layer_methods, [](const LayerMethod& entry) {
           return entry.statistics == StatisticsKind::kSigned;
         });
}

int32_t SketchesPerWorker(const SessionSpec& spec) {
  if (spec.sketches > 0) return spec.sketches;
  return (kMaxSketches - 1) / spec.world_size + 1;  // ceil(16 / world_size)
}

int64_t VectorsPerWorker(const SessionSpec& spec, int64_t layer) {
  const StatisticsKind kind = StatisticsOf(spec, layer);
  if (kind == StatisticsKind::kCovariance) return 0;
  return kind == StatisticsKind::kSigned ? SketchesPerWorker(spec) : 1;
}

int64_t StatisticsElements(const SessionSpec& spec, int64_t layer) {
  const LayerSpec& shape = spec.layers[static_cast<size_t>(layer)];
  if (StatisticsOf(spec, layer) == StatisticsKind::kCovariance) {
    return PackedElements(shape.d_in) + PackedElements(shape.d_out);
  }
  return VectorsPerWorker(spec, layer) * (shape.d_in + shape.d_out);
}

int64_t VectorsPerStep(const SessionSpec& spec, int64_t layer) {
  const StatisticsKind kind = StatisticsOf(spec, layer);
  if (kind == StatisticsKind::kMean) return 1;
  if (kind != StatisticsKind::kCovariance) return spec.world_size * VectorsPerWorker(spec, layer);
  const LayerSpec& shape = spec.layers[static_cast<size_t>(layer)];
  return MaxRows(std::max(shape.d_in, shape.d_out));
}

int32_t DelegateRank(const SessionSpec& spec, int64_t layer) {
  if (!spec.delegates.empty()) return static_cast<int32_t>(spec.delegates[static_cast<size_t>(layer)]);
  return static_cast<int32_t>(layer % spec.world_size);
}

absl::string_view ModeName(Mode mode) { return mode == Mode::kFirstOrder ? "FIRST_ORDER" : "SECOND_ORDER"; }

absl::string_view ExchangeModeName(ExchangeMode exchange) {
  switch (exchange) {
    case ExchangeMode::kDirect:
      return "DIRECT";
    case ExchangeMode::kDelegate:
      return "DELEGATE";
    case ExchangeMode::kPullFactors:
      return "PULL_FACTORS";
    case ExchangeMode::kReplay:
      return "REPLAY";
    case ExchangeMode::kSharded:
      return "SHARDED";
  }
  return "UNKNOWN";
}

absl::string_view StatisticsKindName(StatisticsKind kind) {
  switch (kind) {
    case StatisticsKind::kMean:
      return "MEAN";
    case StatisticsKind::kPerWorkerMean:
      return "PER_WORKER_MEAN";
    case StatisticsKind::kSigned:
      return "SIGNED";
    case StatisticsKind::kCovariance:
      return "COVARIANCE";
  }
  return "UNKNOWN";
}

absl::string_view DecisionName(Decision decision) {
  switch (decision) {
    case Decision::kPreconditioned:
      return "PRECONDITIONED";
    case Decision::kIdentity:
      return "IDENTITY";
    case Decision::kSkip:
      return "SKIP";
  }
  return "UNKNOWN";
}

}  // namespace precondor
