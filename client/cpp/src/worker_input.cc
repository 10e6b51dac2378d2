// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/worker_input.h"

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/check.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/wire_bounds.h"
#include "proto/wire/tensor_codec.h"

namespace precondor {

absl::Status CheckShape(const std::string& what, const char* name, ConstMatrixView have, int64_t rows, int64_t cols) {
  const bool there = have.data != nullptr || rows * cols == 0;
  if (there && have.rows == rows && have.cols == cols && (rows == 1 || have.stride >= cols)) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
                        absl::StrCat(what, ": ", name, ": expected [", rows, ", ", cols, "], got [", have.rows, ", ",
                                     have.cols, "]", have.data == nullptr ? " without memory" : ""));
}

absl::Status CheckParts(const std::string& what, const LayerSpec& layer, absl::Span<const GradientPart> parts) {
  const bool fits = parts.size() <= kMaxGradientParts && ReceivedElements(parts) <= layer.d_out * layer.d_in &&
                    absl::c_all_of(parts, [&layer](const GradientPart& part) { return IsWithin(part, layer); });
  if (fits) return absl::OkStatus();
  return ReasonedStatus(
      absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
      absl::StrCat(what, ": parts: expected at most ", kMaxGradientParts, " of [", layer.d_out, ", ", layer.d_in,
                   "] that do not overlap, got ", parts.size(), " with ", ReceivedElements(parts), " elements"));
}

absl::Status CheckSamples(const std::string& what, uint64_t samples) {
  if (samples > 0 && samples <= kMaxSamples) return absl::OkStatus();
  return ReasonedStatus(absl::StatusCode::kInvalidArgument, ErrorReason::kMalformed,
                        absl::StrCat(what, ": samples: expected 1 ... ", kMaxSamples, ", got ", samples));
}

std::shared_ptr<const std::vector<uint8_t>> EncodeTensors(DType dtype, std::initializer_list<ConstMatrixView> matrices,
                                                          std::vector<v1::TensorHeader>& tensors) {
  size_t bytes = 0;
  for (const ConstMatrixView& m : matrices) bytes += static_cast<size_t>(m.size()) * ByteSize(dtype);
  auto payload = std::make_shared<std::vector<uint8_t>>(bytes);
  size_t offset = 0;
  for (const ConstMatrixView& m : matrices) {
    const float scale = wire::TensorScale(dtype, m);
    const size_t size = static_cast<size_t>(m.size()) * ByteSize(dtype);
    const absl::Status status = wire::EncodeMatrix(dtype, scale, m, absl::MakeSpan(*payload).subspan(offset, size));
    PRECONDOR_CHECK(status.ok());  // the span has the matrix' size
    offset += size;
    tensors.push_back(wire::EncodeTensorHeader({dtype, {m.rows, m.cols}, scale}));
  }
  return payload;
}

PreconditionFuture FailedFuture(const absl::Status& status) {
  auto state = std::make_shared<PreconditionFuture::State>("", MatrixView(), false, false);
  state->Fail(status);
  return PreconditionFuture(std::move(state));
}

}  // namespace precondor
