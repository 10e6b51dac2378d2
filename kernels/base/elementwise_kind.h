// SPDX-License-Identifier: Apache-2.0
// The operations element by element that run together (kernels/operation.h), apart for device code.
#pragma once

#include <cstdint>

namespace precondor {

// Each as Backend's operation of the same name says.
enum class ElementwiseKind : uint8_t {
  kAxpby,  // zeros and copies are such too
  kScaleRows,
  kScaleColumns,
  kScaleBothSides,
  kAddDiagonal,  // of y, by alpha
  kPackLower,
  kUnpackLower,
  kPackRow,
  kSymmetrize,  // y
};

}  // namespace precondor
