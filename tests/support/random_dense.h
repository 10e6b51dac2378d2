// SPDX-License-Identifier: Apache-2.0
// Matrices of normal numbers, as floats hold them, for what is compared with the naive references.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "kernels/base/random.h"
#include "tests/reference/naive_linear_algebra.h"

namespace precondor {

inline reference::Dense RandomDense(int64_t rows, int64_t cols, uint64_t seed) {
  std::vector<float> normals(rows * cols);
  CounterRandom({seed}).Normals(0, absl::MakeSpan(normals));
  reference::Dense out(rows, cols);
  std::copy(normals.begin(), normals.end(), out.data.begin());
  return out;
}

}  // namespace precondor
