// SPDX-License-Identifier: Apache-2.0
// Kinds of element-wise operations (kernels/operation.h). A header of its own, so that device code can include it.
#pragma once

#include <cstdint>

namespace precondor {

// Each kind does what the operation of Backend with its name does.
enum class ElementwiseKind : uint8_t {
  kAxpby,  // also fills with zeros and copies
  kScaleRows,
  kScaleColumns,
  kScaleBothSides,
  kAddDiagonal,  // adds alpha to the diagonal of y
  kPackLower,
  kUnpackLower,
  kPackRow,
  kSymmetrize,     // y in place
  kMultiply,       // MultiplyElements: y = alpha x v + beta y
  kDivideByRoot,   // y = alpha x / (sqrt(v) + beta)
  kDivideByOuter,  // y_ij = alpha x_ij / (scales_i column_scales_j + beta)
  kGather,
};

}  // namespace precondor
