// SPDX-License-Identifier: Apache-2.0
#include "tests/support/normal_floats.h"

#include <cstddef>
#include <random>

namespace precondor {

std::vector<float> Normal(int64_t count, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = normal(rng);
  return out;
}

}  // namespace precondor
