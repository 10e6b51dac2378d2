// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/stream_limits.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PRECONDOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PRECONDOR_CLONES
#endif

namespace precondor {

PRECONDOR_CLONES float ReadAll(const float* data, int64_t count) {
  float sums[64] = {};  // apart, so that the loop over them is vectors
  for (int64_t i = 0; i < count; i += 64) {
    for (int64_t j = 0; j < 64; ++j) sums[j] += data[i + j];
  }
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

PRECONDOR_CLONES void ScaleAll(float* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i) data[i] *= 0.999f;
}

}  // namespace precondor
