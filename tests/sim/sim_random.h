// SPDX-License-Identifier: Apache-2.0
// The simulator's only source of chance: a run is a function of its seed.
#pragma once

#include <cstdint>

namespace precondor::sim {

// SplitMix64 (Steele, Lea, Flood 2014).
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed)) {}
  uint64_t Bits() { return Mix(state_++); }
  // 0 ... bound - 1.
  uint64_t Below(uint64_t bound) { return Bits() % bound; }
  // first ... last.
  int64_t Between(int64_t first, int64_t last) {
    return first + static_cast<int64_t>(Below(static_cast<uint64_t>(last - first) + 1));
  }
  bool Chance(double probability) { return static_cast<double>(Bits() >> 11) * 0x1p-53 < probability; }

 private:
  uint64_t state_;
};

}  // namespace precondor::sim
