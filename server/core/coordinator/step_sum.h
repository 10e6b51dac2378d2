// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace precondor {

// Returns x + y, or the greatest number where the sum would be greater.
inline uint64_t StepSum(uint64_t x, uint64_t y) { return x + std::min(y, std::numeric_limits<uint64_t>::max() - x); }

}  // namespace precondor
