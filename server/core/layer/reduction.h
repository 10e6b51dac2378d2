// SPDX-License-Identifier: Apache-2.0
// Averages over workers: in rank order, weighted by samples, in f64, so that any order of arrival gives the same bits.
// Callers pass the contributions in rank order.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "kernels/base/dtype.h"
#include "server/core/resources/memory_pools.h"

namespace precondor {

// Computes sum_r n_r x_r / sum_r n_r, one contribution after the other. A single contribution is given back exactly (up
// to 2^29 samples). Not thread-safe.
class WeightedSum {
 public:
  // Returns a sum of zeros, or ResourceExhausted if the system has no memory for it.
  static absl::StatusOr<WeightedSum> Make(int64_t elements);
  // sum += samples * values.
  void Add(uint64_t samples, absl::Span<const float> values);
  // sum += samples * the size() elements in wire form at `bytes` (see DecodeElements).
  void Add(uint64_t samples, DType dtype, const void* bytes, float scale);
  // out = sum / total samples, rounded to f32.
  void Finish(absl::Span<float> out) const;
  int64_t size() const { return static_cast<int64_t>(sum_.span().size()); }

 private:
  explicit WeightedSum(HostBuffer<double> zeros) : sum_(std::move(zeros)) {}
  HostBuffer<double> sum_;
  uint64_t samples_ = 0;
};

// Returns the factors by which the present workers' vectors are scaled before they are stacked: sqrt(W n_r / N) for W
// present workers, N = sum n_r. With q vectors a worker and k = W q rows, (1/k) sum v v' is then the sample-weighted
// average of the workers' (1/q) sum v v'. Exactly 1 if all samples are equal.
std::vector<double> StackingScales(absl::Span<const uint64_t> samples);

// values *= scale, in f32; nothing for scale 1.
void ScaleInPlace(double scale, absl::Span<float> values);

// Returns |v|^2 in f64, in a fixed order; NaN or infinity if an element is.
double SquaredNorm(absl::Span<const float> values);

}  // namespace precondor
