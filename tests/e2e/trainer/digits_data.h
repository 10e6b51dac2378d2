// SPDX-License-Identifier: Apache-2.0
// The UCI optical handwritten digits: 1,797 images of 8 x 8 pixels (data/ATTRIBUTION.md), split once and for all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "tests/e2e/trainer/host_matrix.h"

namespace precondor::digits {

inline constexpr int64_t kPixels = 64;
inline constexpr int64_t kClasses = 10;

struct Examples {
  HostMatrix pixels;            // [n, 64], scaled to 0 ... 1
  std::vector<int32_t> labels;  // n of 0 ... 9
  int64_t size() const { return pixels.rows(); }
};

struct DigitsData {
  Examples train;
  Examples held_out;
};

// Reads lines of 64 pixels 0 ... 16 and a label, comma-separated, and holds a fifth of the examples out, the same fifth
// in every run.
absl::StatusOr<DigitsData> LoadDigits(const std::string& path);

// The given rows, in the given order.
Examples Select(const Examples& from, absl::Span<const int32_t> rows);

// A random order of 0 ... n - 1, a function of the key on every machine.
std::vector<int32_t> Permutation(absl::Span<const uint64_t> key, int64_t n);

// Rows of the step's batch: `batch_size` different ones, a pure function of (seed, step). Consecutive steps walk
// through a random order of all examples, drawn anew for each pass; what does not fill a batch at the end of a pass is
// left out.
std::vector<int32_t> BatchRows(int64_t examples, int64_t batch_size, uint64_t seed, uint64_t step);

}  // namespace precondor::digits
