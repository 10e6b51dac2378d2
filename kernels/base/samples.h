// SPDX-License-Identifier: Apache-2.0
// What weighs a contribution in its average.
#pragma once

#include <cstdint>

namespace precondor {

// Samples of one contribution: sums over 65536 ranks stay far inside 64 bits, and their products inside f64.
inline constexpr uint64_t kMaxSamples = uint64_t{1} << 40;

// The weight in f32 of a contribution to a sum that is the average: 1 of a single one.
inline float ShareOf(uint64_t samples, uint64_t total) {
  return static_cast<float>(static_cast<double>(samples) / static_cast<double>(total));
}

}  // namespace precondor
