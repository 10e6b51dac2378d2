// SPDX-License-Identifier: Apache-2.0
// What a worker is given: checks, and how it is encoded.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "client/cpp/src/result_state.h"
#include "kernels/base/dtype.h"
#include "kernels/base/matrix_view.h"
#include "precondor/v1/common.pb.h"

namespace precondor {

// InvalidArgument SHAPE_MISMATCH unless `have` is [rows, cols] and has memory.
absl::Status CheckShape(const std::string& what, const char* name, ConstMatrixView have, int64_t rows, int64_t cols);
// InvalidArgument MALFORMED.
absl::Status CheckSamples(const std::string& what, uint64_t samples);

// Encodes matrices one after the other; `tensors` gets their headers.
std::shared_ptr<const std::vector<uint8_t>> EncodeTensors(DType dtype, std::initializer_list<ConstMatrixView> matrices,
                                                          std::vector<v1::TensorHeader>& tensors);

PreconditionFuture FailedFuture(const absl::Status& status);

}  // namespace precondor
