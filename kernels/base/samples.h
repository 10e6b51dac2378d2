// SPDX-License-Identifier: Apache-2.0
// Sample counts, the weights of contributions in an average.
#pragma once

#include <cstdint>

namespace precondor {

// Greatest number of samples of one contribution. Sums over 65536 ranks stay far inside 64 bits, and products of these
// numbers inside the range of f64.
inline constexpr uint64_t kMaxSamples = uint64_t{1} << 40;

}  // namespace precondor
