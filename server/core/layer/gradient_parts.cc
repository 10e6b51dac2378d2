// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/gradient_parts.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/dtype.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

absl::StatusOr<std::shared_ptr<const Payload>> Copy(const LayerSpec& layer, absl::Span<const GradientPart> parts,
                                                    const Payload& whole, size_t element_bytes) {
  const auto size = static_cast<int64_t>(element_bytes);
  Payload copy;
  try {
    copy.reserve(static_cast<size_t>(ReceivedElements(parts) * size));
  } catch (const std::exception&) {
    return ReasonedStatus(absl::StatusCode::kResourceExhausted, ErrorReason::kCapacity,
                          absl::StrCat("no memory for an answer of ", ReceivedElements(parts) * size, " bytes"));
  }
  for (const GradientPart& part : parts) {
    for (int64_t row = part.row; row < part.row + part.rows; ++row) {
      const auto begin = whole.begin() + (row * layer.d_in + part.col) * size;
      copy.insert(copy.end(), begin, begin + part.cols * size);
    }
  }
  return std::make_shared<const Payload>(std::move(copy));
}

}  // namespace

absl::Status JoinParts(const LayerSpec& layer, DType dtype, std::vector<StagedContribution>& contributions,
                       absl::Span<float> gradient) {
  // A gap stays NaN. Parts that overlap leave one, if they have as many elements as the gradient.
  std::fill(gradient.begin(), gradient.end(), std::numeric_limits<float>::quiet_NaN());
  int64_t joined = 0;
  for (StagedContribution& contribution : contributions) {
    const uint8_t* next = contribution.bytes.data();
    for (const GradientPart& part : contribution.parts) {
      for (int64_t row = part.row; row < part.row + part.rows; ++row) {
        DecodeElements(dtype, next, contribution.scales[0], gradient.subspan(row * layer.d_in + part.col, part.cols));
        next += part.cols * static_cast<int64_t>(ByteSize(dtype));
      }
      joined += part.size();
    }
    contribution.bytes = Payload();
  }
  contributions.clear();
  const auto elements = static_cast<int64_t>(gradient.size());
  if (joined == elements && AllFinite(gradient)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the ranks' parts have ", joined, " elements, ",
                                                    joined == elements ? "some twice, " : "", "of the gradient's ",
                                                    elements));
}

absl::StatusOr<GradientResult> AnswerParts::Cut(const LayerSpec& layer, const std::vector<GradientPart>& parts,
                                                GradientResult whole) {
  if (whole.bytes == nullptr) return whole;
  const int64_t elements = ReceivedElements(parts);
  const std::shared_ptr<const Payload> bytes = std::exchange(whole.bytes, nullptr);
  if (elements == 0) {
    whole.tensors.clear();
    return whole;
  }
  whole.tensors[0].dims = {1, elements};
  std::vector<GradientPart> rectangles = parts;
  for (GradientPart& part : rectangles) part.sent = true;  // of no matter here
  MutexLock lock(mu_);
  if (const auto found = bytes_.find(rectangles); found != bytes_.end()) {
    whole.bytes = found->second;
    return whole;
  }
  const int64_t most = 2 * layer.d_out * layer.d_in;  // what is reserved
  if (elements_ + elements > most) {
    return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
                          absl::StrCat("layer \"", layer.name, "\": parts that differ have ", elements_ + elements,
                                       " elements of the answer, expected at most ", most,
                                       "; ranks that get the same elements have to list the same parts"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(whole.bytes, Copy(layer, parts, *bytes, ByteSize(whole.tensors[0].dtype)));
  elements_ += elements;
  bytes_.emplace(std::move(rectangles), whole.bytes);
  return whole;
}

}  // namespace precondor
