// SPDX-License-Identifier: Apache-2.0
// Checks and encodes a worker's input.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "client/cpp/src/result_state.h"
#include "kernels/base/dtype.h"
#include "kernels/base/gradient_part.h"
#include "kernels/base/matrix_view.h"
#include "kernels/base/session_spec.h"
#include "precondor/v1/common.pb.h"

namespace precondor {

// Returns INVALID_ARGUMENT (SHAPE_MISMATCH) unless `have` is [rows, cols] and has memory, if it has elements.
absl::Status CheckShape(const std::string& what, const char* name, ConstMatrixView have, int64_t rows, int64_t cols);
// Returns INVALID_ARGUMENT (SHAPE_MISMATCH) unless the parts are within the layer's gradient, and not larger together.
absl::Status CheckParts(const std::string& what, const LayerSpec& layer, absl::Span<const GradientPart> parts);
// Returns INVALID_ARGUMENT (MALFORMED) unless `samples` is in 1 ... kMaxSamples.
absl::Status CheckSamples(const std::string& what, uint64_t samples);

// Encodes matrices one after the other, and appends their headers to `tensors`.
std::shared_ptr<const std::vector<uint8_t>> EncodeTensors(DType dtype, std::initializer_list<ConstMatrixView> matrices,
                                                          std::vector<v1::TensorHeader>& tensors);

// Returns a future that is ready with `status`.
PreconditionFuture FailedFuture(const absl::Status& status);

}  // namespace precondor
