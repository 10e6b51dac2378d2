// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/payload.h"

#include <algorithm>
#include <cmath>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/payload_digest.h"
#include "kernels/base/samples.h"
#include "kernels/base/status_macros.h"
#include "server/core/layer/reduction.h"

namespace precondor {
namespace {

constexpr int64_t kBlock = 1024;

absl::Status Invalid(ErrorReason reason, const SessionSpec& spec, const ContributionKey& key,
                     const absl::AlphaNum& what) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, reason, absl::StrCat(DescribeKey(spec, key), ": ", what));
}

// Returns the value to compare with the squared limit of norms: |v|^2 of a row, or the trace of a packed covariance;
// NaN or infinity if any element is.
double SquaredSize(const TensorDesc& tensor, const uint8_t* in, bool packed) {
  float block[kBlock];
  const int64_t width = tensor.dims[1];
  double squared = 0, trace = 0;
  int64_t diagonal = 0;  // index of the next diagonal element
  int64_t row = 0;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const absl::Span<float> values = absl::MakeSpan(block, std::min(kBlock, width - begin));
    DecodeElements(tensor.dtype, in + begin * ByteSize(tensor.dtype), tensor.scale, values);
    squared += SquaredNorm(values);
    for (; packed && diagonal < begin + static_cast<int64_t>(values.size()); diagonal += ++row + 1) {
      trace += std::abs(values[diagonal - begin]);
    }
  }
  return packed && std::isfinite(squared) ? trace : squared;
}

}  // namespace

std::string DescribeKey(const SessionSpec& spec, const ContributionKey& key) {
  absl::string_view name;
  if (key.layer < spec.layers.size()) name = spec.layers[key.layer].name;
  return absl::StrCat("session \"", spec.name, "\" step ", key.step, " layer ", key.layer, " \"", name.substr(0, 64),
                      "\" rank ", key.rank);
}

absl::StatusOr<GradientResult> OnHost(GradientResult result) {
  if (result.on_device == nullptr) return result;
  PRECONDOR_ASSIGN_OR_RETURN(result.bytes, result.on_device->Download());
  result.on_device = nullptr;
  return result;
}

uint64_t Digest(const ContributionHeader& header, const Payload& payload, bool device_plane) {
  uint64_t content = 0;
  if (header.on_device != nullptr) {
    content = header.on_device->facts.digest;
  } else if (device_plane && header.kind == ContributionKind::kGradient && !header.tensors.empty() &&
             header.tensors[0].dtype == DType::kF32) {
    content = PayloadDigest(payload.data(), static_cast<int64_t>(payload.size() / sizeof(float)));
  } else {
    content = absl::HashOf(absl::string_view(reinterpret_cast<const char*>(payload.data()), payload.size()));
  }
  uint64_t digest = absl::HashOf(header.abstain, header.abstain ? 0 : header.samples, content);
  for (const TensorDesc& tensor : header.tensors) digest = absl::HashOf(digest, tensor.scale, tensor.dims);
  for (const GradientPart& part : header.parts) {
    digest = absl::HashOf(digest, part.row, part.rows, part.col, part.cols, part.sent);
  }
  return digest;
}

absl::Status CheckStatistics(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                             double max_norm_per_sqrt_element) {
  const uint8_t* in = payload.data();
  const std::array<int64_t, 2> rows = RowsOf(spec, header);
  const bool covariance = StatisticsOf(spec, header.key.layer) == StatisticsKind::kCovariance;
  const LayerSpec& layer = spec.layers[header.key.layer];
  for (size_t t = 0; t < header.tensors.size(); ++t) {
    const TensorDesc& tensor = header.tensors[t];
    const char* name = t == 0 ? "a" : "g";
    const bool packed = covariance && rows[t] == 0;
    const double limit = max_norm_per_sqrt_element * std::sqrt(static_cast<double>(t == 0 ? layer.d_in : layer.d_out));
    for (int64_t row = 0; row < tensor.dims[0]; ++row) {
      const double squared = SquaredSize(tensor, in, packed);
      if (!std::isfinite(squared)) {
        return Invalid(ErrorReason::kNonFinite, spec, header.key,
                       absl::StrCat("statistics ", name, " row ", row, " is not finite"));
      }
      if (squared > limit * limit) {
        return Invalid(ErrorReason::kOverNorm, spec, header.key,
                       absl::StrCat("statistics ", name, " row ", row, ": expected a norm of at most ", limit, ", got ",
                                    std::sqrt(squared)));
      }
      in += tensor.dims[1] * ByteSize(tensor.dtype);
    }
  }
  return absl::OkStatus();
}

std::array<int64_t, 2> RowsOf(const SessionSpec& spec, const ContributionHeader& header) {
  if (StatisticsOf(spec, header.key.layer) != StatisticsKind::kCovariance) return {0, 0};
  const LayerSpec& layer = spec.layers[header.key.layer];
  const auto rows = [&](size_t side, int64_t d) {
    const std::vector<int64_t>& dims = header.tensors[side].dims;
    return dims[1] == PackedElements(d) ? 0 : dims[0];
  };
  return {rows(0, layer.d_in), rows(1, layer.d_out)};
}

StatisticsSide SideOf(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side) {
  const int64_t d = side == 0 ? spec.layers[layer].d_in : spec.layers[layer].d_out;
  if (StatisticsOf(spec, layer) != StatisticsKind::kCovariance) return {VectorsPerWorker(spec, layer), d, false};
  if (contribution.rows[side] > 0) return {contribution.rows[side], d, false};
  return {1, PackedElements(d), true};
}

void DecodeStatistics(const SessionSpec& spec, uint32_t layer, const StagedContribution& contribution, int side,
                      absl::Span<float> out) {
  const size_t before = side == 0 ? 0 : static_cast<size_t>(SideOf(spec, layer, contribution, 0).elements());
  const DType dtype = spec.statistics_dtype;
  DecodeElements(dtype, contribution.bytes.data() + before * ByteSize(dtype), contribution.scales[side], out);
}

absl::Status CheckGradient(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                           double max_norm) {
  if (header.tensors.empty()) return absl::OkStatus();  // SHARDED: the rank only receives
  const TensorDesc& tensor = header.tensors[0];
  const int64_t elements = tensor.dims[0] * tensor.dims[1];
  if (header.on_device != nullptr && !header.on_device->facts.finite) {
    return Invalid(ErrorReason::kNonFinite, spec, header.key, "the gradient holds a value that is not finite");
  }
  if (header.on_device != nullptr) return absl::OkStatus();
  float block[kBlock];
  double squared = 0;
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const absl::Span<float> values = absl::MakeSpan(block, std::min(kBlock, elements - begin));
    DecodeElements(tensor.dtype, payload.data() + begin * ByteSize(tensor.dtype), tensor.scale, values);
    if (!AllFinite(values)) {
      return Invalid(ErrorReason::kNonFinite, spec, header.key,
                     absl::StrCat("gradient elements ", begin, " ... ", begin + static_cast<int64_t>(values.size()) - 1,
                                  " hold a value that is not finite"));
    }
    if (std::isfinite(max_norm)) squared += SquaredNorm(values);
  }
  if (std::sqrt(squared) <= max_norm) return absl::OkStatus();
  return Invalid(ErrorReason::kOverNorm, spec, header.key,
                 absl::StrCat("gradient: expected a norm of at most ", max_norm, ", got ", std::sqrt(squared)));
}

}  // namespace precondor
