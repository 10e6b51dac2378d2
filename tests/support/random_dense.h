// SPDX-License-Identifier: Apache-2.0
// Matrices of random numbers, as floats hold them, for what is compared with the naive references.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/random.h"
#include "tests/reference/naive_linear_algebra.h"

namespace precondor {

// Normal.
inline reference::Dense RandomDense(int64_t rows, int64_t cols, uint64_t seed) {
  std::vector<float> normals(rows * cols);
  CounterRandom({seed}).Normals(0, absl::MakeSpan(normals));
  reference::Dense out(rows, cols);
  std::copy(normals.begin(), normals.end(), out.data.begin());
  return out;
}

// Uniform in [-1, 1), exactly representable in f32.
inline reference::Dense Uniform(int64_t rows, int64_t cols, uint64_t seed) {
  const CounterRandom random({seed, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols)});
  reference::Dense out(rows, cols);
  for (size_t i = 0; i < out.data.size(); ++i) {
    out.data[i] = static_cast<float>(static_cast<int64_t>(random.Bits(i) >> 40) - (1 << 23)) / (1 << 23);
  }
  return out;
}

}  // namespace precondor
