// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace precondor {

// Precision to which the factors of a matrix product are rounded before it. The sums are f32. kBf16x3: on a device with
// units for products of bf16, each factor becomes the sum of two bf16 numbers, and the product of the two lesser parts
// is left out: the error is at most 2^-16 of the products. On other devices it is kF32. kTf32: each factor keeps ten
// bits after the point, rounded or truncated as the device's units for products of f32 do. On a device without these
// units, and in low rank, it is kF32.
enum class ProductPrecision : uint8_t { kF32, kBf16, kBf16x3, kTf32 };

}  // namespace precondor
