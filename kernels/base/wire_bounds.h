// SPDX-License-Identifier: Apache-2.0
// Upper bounds of numbers that a peer reports about itself. Sums with such numbers, and counters that start from them,
// stay far inside 64 bits, and no wrong number can make all later ones stale.
#pragma once

#include <cstdint>

namespace precondor {

inline constexpr uint64_t kMaxStep = uint64_t{1} << 48;
// An incarnation in nanoseconds since 1970 reaches the bound in 2262.
inline constexpr uint64_t kMaxIncarnation = (uint64_t{1} << 63) - 1;

// Greatest number of samples of one contribution, its weight in an average. Sums over 65536 ranks stay far inside 64
// bits, and products of these numbers inside the range of f64.
inline constexpr uint64_t kMaxSamples = uint64_t{1} << 40;

}  // namespace precondor
