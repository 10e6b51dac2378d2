// SPDX-License-Identifier: Apache-2.0
// Kinds of operations (kernels/operation.h), and the precision of products. Device code can include this header.
#pragma once

#include <cstdint>

namespace precondor {

// Precision to which the factors of a matrix product are rounded before it. The sums are f32. kTf32: each factor keeps
// ten bits after the point, rounded or truncated as the device's units for products of f32 do. On a device without
// these units it is kF32. The numbers stand in saved states.
enum class ProductPrecision : uint8_t { kF32 = 0, kBf16 = 1, kTf32 = 3 };

// Kinds of element-wise operations. Each does what the operation of Backend with its name does.
enum class ElementwiseKind : uint8_t {
  kAxpby,  // Combine: y = alpha x + beta v; also fills with zeros and copies
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
