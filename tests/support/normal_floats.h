// SPDX-License-Identifier: Apache-2.0
// Normal numbers for statistics and gradients whose values do not matter.
#pragma once

#include <cstdint>
#include <vector>

namespace precondor {

std::vector<float> Normal(int64_t count, uint64_t seed);

}  // namespace precondor
