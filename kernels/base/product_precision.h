// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace precondor {

// What the factors of a product are rounded to before it; its sums are f32. kBf16x3: where a device has units for
// products of bf16, each factor is the sum of two bf16 numbers, and the product of the lesser two is left out: off by
// 2^-16 of what is multiplied at most. Elsewhere kBf16x3 is kF32. kTf32: ten bits behind the point are kept of each
// factor, rounded or cut off, as units for products of f32 do it; kF32 where there are none, and in low rank.
enum class ProductPrecision : uint8_t { kF32, kBf16, kBf16x3, kTf32 };

}  // namespace precondor
