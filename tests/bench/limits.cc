// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/limits.h"

#include <vector>

#include "kernels/base/check.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PRECONDOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PRECONDOR_CLONES
#endif

namespace precondor {
namespace {

constexpr int kChains = 12;  // independent accumulators: latency 4 x 2 units, with some to spare
constexpr int kRounds = 4096;

// V: a vector of floats. The compiler fuses product and sum where the target has such an instruction.
template <typename V>
__attribute__((always_inline)) inline float RunChains() {
  const V x = V{} + 0.999f;
  V sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = V{} + static_cast<float>(i);
  for (int round = 0; round < kRounds; ++round) {
    for (V& sum : sums) sum = sum * x + x;
  }
  V total = {};
  for (const V& sum : sums) total += sum;
  return total[0];
}

using V4 = float __attribute__((vector_size(16)));
float FmaPlain() { return RunChains<V4>(); }

struct FmaKernel {
  float (*run)() = FmaPlain;
  int lanes = 4;
};

#if defined(__x86_64__)
using V8 = float __attribute__((vector_size(32)));
using V16 = float __attribute__((vector_size(64)));
__attribute__((target("avx2,fma"))) float FmaAvx2() { return RunChains<V8>(); }
__attribute__((target("avx512f"))) float FmaAvx512() { return RunChains<V16>(); }
#endif

FmaKernel BestFma() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {FmaAvx512, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {FmaAvx2, 8};
#endif
  return {};
}

volatile float last_result = 0;  // so that the compiler cannot leave the work out

}  // namespace

double RunFmas() {
  static const FmaKernel kernel = BestFma();
  last_result = kernel.run();
  return 2.0 * kernel.lanes * kChains * kRounds;
}

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

DeviceMatrix OneRow(Backend& backend, const std::vector<float>& elements) {
  const int64_t n = static_cast<int64_t>(elements.size());
  DeviceMatrix row = backend.Allocate(1, n).value();
  PRECONDOR_CHECK(backend.Upload(ConstMatrixView(elements.data(), 1, n), row.view()).ok());
  return row;
}

void UpdateOnce(Factor& factor, ConstMatrixView vector) {
  PRECONDOR_CHECK(factor.Prepare(vector).ok() && factor.Conclude().ok());
  factor.Commit();
}

}  // namespace precondor
