// SPDX-License-Identifier: Apache-2.0
// The most that a peer may say of itself. What is added to such a number, or counted up from it, stays far inside 64
// bits, and no wrong number shuts out all later ones.
#pragma once

#include <cstdint>

namespace precondor {

inline constexpr uint64_t kMaxStep = uint64_t{1} << 48;
// Nanoseconds since 1970 reach it in 2262.
inline constexpr uint64_t kMaxIncarnation = (uint64_t{1} << 63) - 1;

}  // namespace precondor
