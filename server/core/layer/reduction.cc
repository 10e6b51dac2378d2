// SPDX-License-Identifier: Apache-2.0
#include "server/core/layer/reduction.h"

#include <algorithm>
#include <cmath>

#include "absl/base/attributes.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Elements decoded at a time: the buffer stays in the first-level cache, so that memory is read once.
constexpr int64_t kReductionBlock = 1024;

// A fixed number of elements at a time, which the compiler turns into vector code. The bits are those of a plain loop.
void Accumulate(double weight, const float* values, int64_t count, double* sum) {
  constexpr int64_t kLanes = 8;
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t j = i; j < i + kLanes; ++j) sum[j] += weight * static_cast<double>(values[j]);
  }
  for (int64_t i = whole; i < count; ++i) sum[i] += weight * static_cast<double>(values[i]);
}

// Eight independent sums: one chain of additions would be bound by their latency. Inlined below once for the baseline
// and once for AVX2, without fused multiplication: the same operations, hence the same bits.
ABSL_ATTRIBUTE_ALWAYS_INLINE inline double SumOfSquares(const float* values, size_t size) {
  double lanes[8] = {};
  const size_t whole = size / 8 * 8;
  for (size_t i = 0; i < whole; i += 8) {
    for (size_t j = 0; j < 8; ++j) {
      const double value = values[i + j];
      lanes[j] += value * value;
    }
  }
  for (size_t i = whole; i < size; ++i) {
    const double value = values[i];
    lanes[i - whole] += value * value;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) double SumOfSquaresAvx2(const float* values, size_t size) {
  return SumOfSquares(values, size);
}
bool HasAvx2() { return __builtin_cpu_supports("avx2") != 0; }
#else
double SumOfSquaresAvx2(const float* values, size_t size) { return SumOfSquares(values, size); }
bool HasAvx2() { return false; }
#endif

}  // namespace

absl::StatusOr<WeightedSum> WeightedSum::Make(int64_t elements) {
  PRECONDOR_ASSIGN_OR_RETURN(HostBuffer<double> sum, HostBuffer<double>::Make(elements));
  std::fill(sum.span().begin(), sum.span().end(), 0.0);
  return WeightedSum(std::move(sum));
}

void WeightedSum::Add(uint64_t samples, absl::Span<const float> values) {
  Accumulate(static_cast<double>(samples), values.data(), size(), sum_.span().data());
  samples_ += samples;
}

void WeightedSum::Add(uint64_t samples, DType dtype, const void* bytes, float scale) {
  const auto* in = static_cast<const uint8_t*>(bytes);
  float block[kReductionBlock];
  for (int64_t begin = 0; begin < size(); begin += kReductionBlock) {
    const int64_t count = std::min(kReductionBlock, size() - begin);
    DecodeElements(dtype, in + begin * ByteSize(dtype), scale, absl::MakeSpan(block, count));
    Accumulate(static_cast<double>(samples), block, count, sum_.span().data() + begin);
  }
  samples_ += samples;
}

void WeightedSum::Finish(absl::Span<float> out) const {
  // Divides instead of multiplying by the inverse, so that n x / n is x.
  const double total = static_cast<double>(samples_);
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(sum_.span()[i] / total);
}

std::vector<double> StackingScales(absl::Span<const uint64_t> samples) {
  double total = 0;
  for (uint64_t n : samples) total += static_cast<double>(n);
  std::vector<double> scales;
  scales.reserve(samples.size());
  for (uint64_t n : samples) {
    scales.push_back(std::sqrt(static_cast<double>(samples.size()) * static_cast<double>(n) / total));
  }
  return scales;
}

void ScaleInPlace(double scale, absl::Span<float> values) {
  const float factor = static_cast<float>(scale);
  if (factor == 1.0f) return;
  for (float& value : values) value *= factor;
}

double SquaredNorm(absl::Span<const float> values) {
  return HasAvx2() ? SumOfSquaresAvx2(values.data(), values.size()) : SumOfSquares(values.data(), values.size());
}

}  // namespace precondor
