// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/admission.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/payload_digest.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/wire_bounds.h"
#include "server/core/layer/reduction.h"
#include "server/core/resources/reservation.h"
#include "server/core/resources/session_context.h"

namespace precondor {

IncomingFacts::IncomingFacts(const ContributionHeader& header, uint64_t payload_bytes, bool with_norm,
                             bool device_plane)
    : payload_bytes_(payload_bytes),
      gradient_(header.kind == ContributionKind::kGradient && !header.tensors.empty()),
      with_norm_(with_norm),
      device_plane_(device_plane) {
  if (!gradient_) return;
  dtype_ = header.tensors[0].dtype;
  scale_ = header.tensors[0].scale;
}

void IncomingFacts::Advance(absl::Span<const uint8_t> received) {
  const uint64_t block = static_cast<uint64_t>(kBlock) * ByteSize(dtype_);
  const bool whole = received.size() == payload_bytes_;
  while (inspected_ < received.size()) {
    const uint64_t size = std::min<uint64_t>(block, received.size() - inspected_);
    if (size < block && !whole) return;
    InspectBlock(received.subspan(inspected_, size));
    inspected_ += size;
  }
}

void IncomingFacts::InspectBlock(absl::Span<const uint8_t> bytes) {
  const int64_t first = static_cast<int64_t>(inspected_ / ByteSize(dtype_));
  const int64_t count = static_cast<int64_t>(bytes.size() / ByteSize(dtype_));
  if (device_plane_ && gradient_ && dtype_ == DType::kF32) {
    found_.digest += PayloadDigest(bytes.data(), count, first);
  } else {
    found_.digest =
        absl::HashOf(found_.digest, absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  if (!gradient_ || found_.not_finite.has_value()) return;
  float decoded[kBlock];
  absl::Span<const float> values(reinterpret_cast<const float*>(bytes.data()), count);
  if (dtype_ != DType::kF32 || scale_ != 1.0f) {
    DecodeElements(dtype_, bytes.data(), scale_, absl::MakeSpan(decoded, count));
    values = absl::MakeConstSpan(decoded, count);
  }
  if (!AllFinite(values)) {
    found_.not_finite = first;
    return;
  }
  if (with_norm_) found_.squared_norm += SquaredNorm(values);
}

namespace {

using absl::StatusCode;

constexpr int64_t kBlock = IncomingFacts::kBlock;  // elements of a payload that are decoded at a time

struct Expected {
  const char* name;
  std::vector<int64_t> dims;
  DType dtype;
  bool or_rows = false;  // COVARIANCE: `dims` are of the packed form, but rows are allowed too
  int64_t d = 0;
};

std::vector<Expected> ExpectedTensors(const SessionSpec& spec, const ContributionHeader& header) {
  const LayerSpec& layer = spec.layers[header.key.layer];
  if (header.kind == ContributionKind::kPull) return {};
  if (header.kind == ContributionKind::kGradient) {
    if (spec.exchange != ExchangeMode::kSharded) return {{"gradient", {layer.d_out, layer.d_in}, spec.gradient_dtype}};
    const int64_t elements = SentElements(header.parts);
    if (elements == 0) return {};
    return {{"gradient", {1, elements}, spec.gradient_dtype}};
  }
  const DType dtype = spec.statistics_dtype;
  if (StatisticsOf(spec, header.key.layer) == StatisticsKind::kCovariance) {
    return {{"a", {1, PackedElements(layer.d_in)}, dtype, true, layer.d_in},
            {"g", {1, PackedElements(layer.d_out)}, dtype, true, layer.d_out}};
  }
  const int64_t q = VectorsPerWorker(spec, header.key.layer);
  return {{"a", {q, layer.d_in}, dtype}, {"g", {q, layer.d_out}, dtype}};
}

bool HasShape(const Expected& expected, const std::vector<int64_t>& dims) {
  if (dims == expected.dims) return true;
  return expected.or_rows && dims.size() == 2 && dims[0] >= 1 && dims[0] <= MaxRows(expected.d) &&
         dims[1] == expected.d;
}

absl::Status Refusal(StatusCode code, ErrorReason reason, const SessionSpec& spec, const ContributionKey& key,
                     const absl::AlphaNum& what) {
  return ReasonedStatus(code, reason, absl::StrCat(DescribeKey(spec, key), ": ", what));
}

absl::Status Invalid(ErrorReason reason, const SessionSpec& spec, const ContributionKey& key,
                     const absl::AlphaNum& what) {
  return Refusal(StatusCode::kInvalidArgument, reason, spec, key, what);
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
  if (!HasShape(expected, got.dims)) {
    const std::string rows =
        expected.or_rows ? absl::StrCat(" or up to ", DimsText({MaxRows(expected.d), expected.d})) : "";
    return Invalid(
        ErrorReason::kShapeMismatch, spec, key,
        absl::StrCat(expected.name, ": expected ", DimsText(expected.dims), rows, ", got ", DimsText(got.dims)));
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

absl::Status CheckParts(const SessionSpec& spec, const ContributionHeader& header) {
  const bool takes_parts = header.kind == ContributionKind::kGradient && spec.exchange == ExchangeMode::kSharded;
  const size_t most = takes_parts ? kMaxGradientParts : 0;
  if (header.parts.size() > most) {
    return Invalid(ErrorReason::kMalformed, spec, header.key,
                   absl::StrCat("expected at most ", most, " parts, got ", header.parts.size()));
  }
  const LayerSpec& layer = spec.layers[header.key.layer];
  for (size_t i = 0; i < header.parts.size(); ++i) {
    const GradientPart& part = header.parts[i];
    if (IsWithin(part, layer)) continue;
    return Invalid(ErrorReason::kShapeMismatch, spec, header.key,
                   absl::StrCat("parts[", i, "]: expected a part of [", layer.d_out, ", ", layer.d_in, "], got rows ",
                                part.row, " + ", part.rows, ", columns ", part.col, " + ", part.cols));
  }
  const int64_t elements = layer.d_out * layer.d_in;
  if (ReceivedElements(header.parts) <= elements) return absl::OkStatus();
  return Invalid(ErrorReason::kShapeMismatch, spec, header.key,
                 absl::StrCat("parts: expected at most the gradient's ", elements, " elements, got ",
                              ReceivedElements(header.parts)));
}

// Checks a contribution in device memory. It must be a gradient that one rank alone sends, since gradients are not
// added up there.
absl::Status CheckOnDevice(const SessionSpec& spec, const ContributionHeader& header) {
  const bool fits = header.kind == ContributionKind::kGradient && !header.abstain &&
                    spec.exchange != ExchangeMode::kSharded && GradientContributors(spec) == 1 &&
                    spec.gradient_dtype == DType::kF32 && header.tensors[0].scale == 1.0f;
  if (fits) return absl::OkStatus();
  return Invalid(ErrorReason::kMalformed, spec, header.key,
                 "in a ring: expected a gradient in F32 with scale 1 that one rank alone sends");
}

absl::Status CheckPull(const SessionSpec& spec, const Method& method, const ContributionHeader& header) {
  const ContributionKey& key = header.key;
  const bool pull = header.kind == ContributionKind::kPull;
  if (header.kind != ContributionKind::kStatistics && pull != WorkersPrecondition(spec)) {
    return Refusal(StatusCode::kInvalidArgument, ErrorReason::kMalformed, spec, key,
                   absl::StrCat("expected ", pull ? "GRADIENT" : "PULL", " with exchange ",
                                ExchangeModeName(spec.exchange), ", got ", pull ? "PULL" : "GRADIENT"));
  }
  if (!pull) return absl::OkStatus();
  if (header.abstain) {
    return Refusal(StatusCode::kInvalidArgument, ErrorReason::kMalformed, spec, key, "a PULL cannot be an abstention");
  }
  if (header.mode == Mode::kSecondOrder && IsStatisticStep(spec, key.step) && method.needs_statistics()) {
    return absl::OkStatus();
  }
  return Refusal(StatusCode::kFailedPrecondition, ErrorReason::kNotStatisticStep, spec, key,
                 "PULL: expected a statistic step in second order, of a layer that takes statistics");
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

absl::Status CheckSender(const SessionSpec& spec, const RankHolders& holders, const ContributionKey& key) {
  if (key.step > kMaxStep) {
    return Refusal(StatusCode::kInvalidArgument, ErrorReason::kMalformed, spec, key,
                   absl::StrCat("step: expected at most ", kMaxStep));
  }
  if (key.epoch < holders.epoch) {
    return Refusal(StatusCode::kFailedPrecondition, ErrorReason::kStaleEpoch, spec, key,
                   absl::StrCat("expected epoch ", holders.epoch, ", got ", key.epoch));
  }
  if (key.epoch > holders.epoch) {
    return Refusal(StatusCode::kUnavailable, ErrorReason::kFutureEpoch, spec, key,
                   absl::StrCat("epoch is ", holders.epoch, " here so far, got ", key.epoch));
  }
  if (holders.fenced) {
    return Refusal(StatusCode::kUnavailable, ErrorReason::kNotActive, spec, key, "the epoch is about to begin");
  }
  if (key.rank >= holders.incarnations.size()) {
    return Refusal(StatusCode::kNotFound, ErrorReason::kUnknownRank, spec, key,
                   absl::StrCat("expected a rank below ", holders.incarnations.size()));
  }
  const uint64_t holder = holders.incarnations[key.rank];
  if (holder != 0 && key.incarnation < holder) {
    return Refusal(StatusCode::kFailedPrecondition, ErrorReason::kStaleIncarnation, spec, key,
                   absl::StrCat("held by incarnation ", holder, ", got ", key.incarnation));
  }
  if (holder != 0 && key.incarnation > holder) {
    return Refusal(StatusCode::kNotFound, ErrorReason::kUnknownRank, spec, key,
                   absl::StrCat("incarnation ", key.incarnation, " has not joined, the rank's is ", holder));
  }
  if (holders.joined < holders.incarnations.size()) {
    return Refusal(StatusCode::kUnavailable, ErrorReason::kNotActive, spec, key,
                   absl::StrCat(holders.joined, " of ", holders.incarnations.size(), " ranks have joined"));
  }
  return absl::OkStatus();
}

absl::Status CheckRole(const SessionSpec& spec, const Method& method, const ContributionHeader& header) {
  const ContributionKey& key = header.key;
  PRECONDOR_RETURN_IF_ERROR(CheckPull(spec, method, header));
  if (header.kind == ContributionKind::kStatistics && header.mode == Mode::kFirstOrder) {
    return Refusal(StatusCode::kFailedPrecondition, ErrorReason::kNotStatisticStep, spec, key,
                   "steps in first order take no statistics");
  }
  if (header.kind == ContributionKind::kStatistics && !IsStatisticStep(spec, key.step)) {
    return Refusal(
        StatusCode::kFailedPrecondition, ErrorReason::kNotStatisticStep, spec, key,
        absl::StrCat("statistic steps are those below ", spec.warmup_steps, " and every ", spec.inv_freq, "th"));
  }
  if (header.kind == ContributionKind::kGradient && spec.exchange == ExchangeMode::kDelegate &&
      key.rank != static_cast<uint32_t>(DelegateRank(spec, key.layer))) {
    return Refusal(StatusCode::kFailedPrecondition, ErrorReason::kNotDelegate, spec, key,
                   absl::StrCat("rank ", DelegateRank(spec, key.layer), " sends this layer's gradient"));
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const SessionSpec& spec, const ContributionHeader& header, uint64_t payload_bytes) {
  PRECONDOR_RETURN_IF_ERROR(CheckParts(spec, header));
  if (header.abstain) {
    PRECONDOR_RETURN_IF_ERROR(CheckAbstention(spec, header, payload_bytes));
    return header.on_device == nullptr ? absl::OkStatus() : CheckOnDevice(spec, header);
  }
  const bool weighs = header.kind != ContributionKind::kPull;
  if (weighs && (header.samples == 0 || header.samples > kMaxSamples)) {
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
    const std::vector<int64_t>& dims = header.tensors[i].dims;
    bytes += static_cast<uint64_t>(dims[0]) * dims[1] * ByteSize(expected[i].dtype);
  }
  if (payload_bytes != bytes) {
    return Invalid(ErrorReason::kSizeMismatch, spec, header.key,
                   absl::StrCat("expected a payload of ", bytes, " bytes, got ", payload_bytes));
  }
  return header.on_device == nullptr ? absl::OkStatus() : CheckOnDevice(spec, header);
}

// --- payloads -------------------------------------------------------------------------------------------------------

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

Payload AdmittedContribution::MakePayload() const {
  const std::shared_ptr<const SessionContext> session = session_.lock();
  // Only gradients come back to the pool.
  return session == nullptr || header_.kind != ContributionKind::kGradient ? Payload()
                                                                           : session->payloads->Take(payload_bytes_);
}

uint64_t Digest(const ContributionHeader& header, const IncomingFacts& payload) {
  const DevicePayload* const on_device = header.on_device.get();
  const uint64_t content = on_device != nullptr ? on_device->facts.digest : payload.found().digest;
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

absl::Status CheckGradient(const SessionSpec& spec, const ContributionHeader& header, const IncomingFacts& payload,
                           double max_norm) {
  if (header.tensors.empty()) return absl::OkStatus();  // SHARDED: the rank only receives
  if (header.on_device != nullptr && !header.on_device->facts.finite) {
    return Invalid(ErrorReason::kNonFinite, spec, header.key, "the gradient holds a value that is not finite");
  }
  if (header.on_device != nullptr) return absl::OkStatus();
  if (const std::optional<int64_t> first = payload.found().not_finite; first.has_value()) {
    const int64_t end = std::min(header.tensors[0].dims[0] * header.tensors[0].dims[1], *first + kBlock);
    return Invalid(ErrorReason::kNonFinite, spec, header.key,
                   absl::StrCat("gradient elements ", *first, " ... ", end - 1, " hold a value that is not finite"));
  }
  const double norm = std::sqrt(payload.found().squared_norm);
  if (norm <= max_norm) return absl::OkStatus();
  return Invalid(ErrorReason::kOverNorm, spec, header.key,
                 absl::StrCat("gradient: expected a norm of at most ", max_norm, ", got ", norm));
}

}  // namespace precondor
