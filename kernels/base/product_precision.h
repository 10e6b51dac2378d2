// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace precondor {

// Precision to which the factors of a matrix product are rounded before it. The sums are f32. kTf32: each factor keeps
// ten bits after the point, rounded or truncated as the device's units for products of f32 do. On a device without
// these units it is kF32. The numbers stand in saved states.
enum class ProductPrecision : uint8_t { kF32 = 0, kBf16 = 1, kTf32 = 3 };

}  // namespace precondor
