// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/fma_limit.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace precondor {
namespace {

constexpr int kChains = 12;  // independent accumulators: latency 4 x 2 units, with some to spare
constexpr int kRounds = 4096;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) float FmaAvx512() {
  const __m512 x = _mm512_set1_ps(0.999f);
  __m512 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int round = 0; round < kRounds; ++round) {
    for (auto& sum : sums) sum = _mm512_fmadd_ps(sum, x, x);
  }
  __m512 total = sums[0];
  for (int i = 1; i < kChains; ++i) total = _mm512_add_ps(total, sums[i]);
  float lanes[16];
  _mm512_storeu_ps(lanes, total);  // _mm512_reduce_add_ps makes g++ 12 warn about its own header
  return lanes[0] + lanes[5] + lanes[15];
}

__attribute__((target("avx2,fma"))) float FmaAvx2() {
  const __m256 x = _mm256_set1_ps(0.999f);
  __m256 sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = _mm256_set1_ps(static_cast<float>(i));
  for (int round = 0; round < kRounds; ++round) {
    for (auto& sum : sums) sum = _mm256_fmadd_ps(sum, x, x);
  }
  __m256 total = sums[0];
  for (int i = 1; i < kChains; ++i) total = _mm256_add_ps(total, sums[i]);
  float lanes[8];
  _mm256_storeu_ps(lanes, total);
  return lanes[0] + lanes[3] + lanes[7];
}
#endif

float FmaPlain() {
  float sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = static_cast<float>(i);
  for (int round = 0; round < kRounds; ++round) {
    for (float& sum : sums) sum = sum * 0.999f + 0.999f;
  }
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

struct FmaKernel {
  float (*run)() = FmaPlain;
  int lanes = 1;
};

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

}  // namespace precondor
