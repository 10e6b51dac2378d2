// SPDX-License-Identifier: Apache-2.0
// A sequence of random numbers, the same on every machine and library.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/base/random.h"

namespace precondor::digits {

// A sequence of its own for each (seed, purpose, index), whatever else was drawn.
class SeededRandom {
 public:
  SeededRandom(uint64_t seed, uint64_t purpose, uint64_t index = 0) : bits_({seed, purpose, index}) {}

  // Uniform in [0, 1).
  double Uniform() { return static_cast<double>(bits_.Bits(next_++) >> 11) * 0x1p-53; }
  // Uniform in 0 ... n - 1; the bias of n / 2^64 does not matter here.
  int64_t Below(int64_t n) { return static_cast<int64_t>(bits_.Bits(next_++) % static_cast<uint64_t>(n)); }

  // A random order of 0 ... n - 1.
  std::vector<int32_t> Permutation(int64_t n) {
    std::vector<int32_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(Below(static_cast<int64_t>(i)))]);
    }
    return order;
  }

 private:
  const CounterRandom bits_;
  uint64_t next_ = 0;
};

}  // namespace precondor::digits
