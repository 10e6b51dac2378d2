// SPDX-License-Identifier: Apache-2.0
#include "server/core/payload.h"

#include <algorithm>
#include <cmath>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "server/core/reduction.h"

namespace precondor {
namespace {

// Sums of samples over 65536 ranks stay far inside 64 bits, and their products inside f64.
constexpr uint64_t kMaxSamples = uint64_t{1} << 40;
constexpr int64_t kBlock = 1024;

struct Expected {
  const char* name;
  std::vector<int64_t> dims;
  DType dtype;
};

std::vector<Expected> ExpectedTensors(const SessionSpec& spec, const ContributionHeader& header) {
  const LayerSpec& layer = spec.layers[header.key.layer];
  if (header.kind == ContributionKind::kGradient) {
    return {{"gradient", {layer.d_out, layer.d_in}, spec.gradient_dtype}};
  }
  const int64_t q = VectorsPerWorker(spec);
  return {{"a", {q, layer.d_in}, spec.statistics_dtype}, {"g", {q, layer.d_out}, spec.statistics_dtype}};
}

absl::Status Invalid(ErrorReason reason, const SessionSpec& spec, const ContributionKey& key,
                     const absl::AlphaNum& what) {
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, reason, absl::StrCat(DescribeKey(spec, key), ": ", what));
}

std::string DimsText(const std::vector<int64_t>& dims) {
  constexpr size_t kShown = 8;
  const size_t shown = std::min(dims.size(), kShown);
  return absl::StrCat("[", absl::StrJoin(dims.begin(), dims.begin() + shown, ", "), shown < dims.size() ? ", ..." : "",
                      "]");
}

absl::Status CheckTensor(const SessionSpec& spec, const ContributionKey& key, const Expected& expected,
                         const TensorDesc& got) {
  if (got.dtype != expected.dtype) {
    return Invalid(
        ErrorReason::kDTypeMismatch, spec, key,
        absl::StrCat(expected.name, ": expected ", DTypeName(expected.dtype), ", got ", DTypeName(got.dtype)));
  }
  if (got.dims != expected.dims) {
    return Invalid(ErrorReason::kShapeMismatch, spec, key,
                   absl::StrCat(expected.name, ": expected ", DimsText(expected.dims), ", got ", DimsText(got.dims)));
  }
  if (!std::isfinite(got.scale) || got.scale <= 0) {
    return Invalid(ErrorReason::kMalformed, spec, key,
                   absl::StrCat(expected.name, ": expected a finite positive scale, got ", got.scale));
  }
  return absl::OkStatus();
}

absl::Status CheckAbstention(const SessionSpec& spec, const ContributionHeader& header, uint64_t payload_bytes) {
  if (!header.tensors.empty()) {
    return Invalid(ErrorReason::kMalformed, spec, header.key,
                   absl::StrCat("an abstention has no tensors, got ", header.tensors.size()));
  }
  if (payload_bytes != 0) {
    return Invalid(ErrorReason::kSizeMismatch, spec, header.key,
                   absl::StrCat("an abstention has no payload, got ", payload_bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string DescribeKey(const SessionSpec& spec, const ContributionKey& key) {
  absl::string_view name;
  if (key.layer < spec.layers.size()) name = spec.layers[key.layer].name;
  return absl::StrCat("session \"", spec.name, "\" step ", key.step, " layer ", key.layer, " \"", name.substr(0, 64),
                      "\" rank ", key.rank);
}

int64_t StatisticsElements(const SessionSpec& spec, const LayerSpec& layer) {
  return VectorsPerWorker(spec) * (layer.d_in + layer.d_out);
}

absl::Status CheckTensors(const SessionSpec& spec, const ContributionHeader& header, uint64_t payload_bytes) {
  if (header.abstain) return CheckAbstention(spec, header, payload_bytes);
  if (header.samples == 0 || header.samples > kMaxSamples) {
    return Invalid(ErrorReason::kMalformed, spec, header.key,
                   absl::StrCat("samples: expected 1 ... ", kMaxSamples, ", got ", header.samples));
  }
  const std::vector<Expected> expected = ExpectedTensors(spec, header);
  if (header.tensors.size() != expected.size()) {
    return Invalid(ErrorReason::kMalformed, spec, header.key,
                   absl::StrCat("expected ", expected.size(), " tensors, got ", header.tensors.size()));
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    PRECONDOR_RETURN_IF_ERROR(CheckTensor(spec, header.key, expected[i], header.tensors[i]));
    bytes += static_cast<uint64_t>(expected[i].dims[0]) * expected[i].dims[1] * ByteSize(expected[i].dtype);
  }
  if (payload_bytes != bytes) {
    return Invalid(ErrorReason::kSizeMismatch, spec, header.key,
                   absl::StrCat("expected a payload of ", bytes, " bytes, got ", payload_bytes));
  }
  return absl::OkStatus();
}

uint64_t Digest(const ContributionHeader& header, const Payload& payload) {
  uint64_t digest = absl::HashOf(header.abstain, header.abstain ? 0 : header.samples,
                                 absl::string_view(reinterpret_cast<const char*>(payload.data()), payload.size()));
  for (const TensorDesc& tensor : header.tensors) digest = absl::HashOf(digest, tensor.scale);
  return digest;
}

absl::Status CheckStatistics(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload,
                             double max_norm_per_sqrt_element) {
  const uint8_t* in = payload.data();
  float block[kBlock];
  for (size_t t = 0; t < header.tensors.size(); ++t) {
    const TensorDesc& tensor = header.tensors[t];
    const char* name = t == 0 ? "a" : "g";
    const int64_t width = tensor.dims[1];
    const double limit = max_norm_per_sqrt_element * std::sqrt(static_cast<double>(width));
    for (int64_t row = 0; row < tensor.dims[0]; ++row) {
      double squared = 0;
      for (int64_t begin = 0; begin < width; begin += kBlock) {
        const absl::Span<float> values = absl::MakeSpan(block, std::min(kBlock, width - begin));
        DecodeElements(tensor.dtype, in + begin * ByteSize(tensor.dtype), tensor.scale, values);
        squared += SquaredNorm(values);
      }
      if (!std::isfinite(squared)) {
        return Invalid(ErrorReason::kNonFinite, spec, header.key,
                       absl::StrCat("statistics ", name, " row ", row, " is not finite"));
      }
      if (squared > limit * limit) {
        return Invalid(ErrorReason::kOverNorm, spec, header.key,
                       absl::StrCat("statistics ", name, " row ", row, ": expected a norm of at most ", limit, ", got ",
                                    std::sqrt(squared)));
      }
      in += width * ByteSize(tensor.dtype);
    }
  }
  return absl::OkStatus();
}

void DecodeStatistics(const SessionSpec& spec, const LayerSpec& layer, const Vote& vote, absl::Span<float> out) {
  const size_t split = static_cast<size_t>(VectorsPerWorker(spec) * layer.d_in);
  const DType dtype = spec.statistics_dtype;
  DecodeElements(dtype, vote.bytes.data(), vote.scales[0], out.first(split));
  DecodeElements(dtype, vote.bytes.data() + split * ByteSize(dtype), vote.scales[1], out.subspan(split));
}

absl::Status CheckGradient(const SessionSpec& spec, const ContributionHeader& header, const Payload& payload) {
  const TensorDesc& tensor = header.tensors[0];
  const int64_t elements = tensor.dims[0] * tensor.dims[1];
  float block[kBlock];
  for (int64_t begin = 0; begin < elements; begin += kBlock) {
    const absl::Span<float> values = absl::MakeSpan(block, std::min(kBlock, elements - begin));
    DecodeElements(tensor.dtype, payload.data() + begin * ByteSize(tensor.dtype), tensor.scale, values);
    if (!AllFinite(values)) {
      return Invalid(ErrorReason::kNonFinite, spec, header.key,
                     absl::StrCat("gradient elements ", begin, " ... ", begin + static_cast<int64_t>(values.size()) - 1,
                                  " hold a value that is not finite"));
    }
  }
  return absl::OkStatus();
}

}  // namespace precondor
