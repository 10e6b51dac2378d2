// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace precondor {

// What the factors of a product are rounded to before it; its sums are f32. kBf16x3: where a device has units for
// products of bf16, each factor is the sum of two bf16 numbers, and the product of the lesser two is left out: off by
// 2^-16 of what is multiplied at most. Elsewhere kBf16x3 is kF32.
enum class ProductPrecision : uint8_t { kF32, kBf16, kBf16x3 };

}  // namespace precondor
