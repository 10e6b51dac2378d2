// SPDX-License-Identifier: Apache-2.0
// Counter-based random bits: a pure function of (key, counter), so that the result depends neither on the machine nor
// on the order of calls. Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace precondor {

// Returns one block of the generator. Exposed for its known-answer test.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// A stream of random bits with a key of any number of words. Keys that differ in any word or in length give unrelated
// streams. Copyable; const calls are thread-safe.
class CounterRandom {
 public:
  explicit CounterRandom(absl::Span<const uint64_t> key_words);
  // Returns 64 random bits, a function of the key words and `counter`.
  uint64_t Bits(uint64_t counter) const;
  // Sets out[i] to number first + i of the key's standard normals, |x| < 6.8. Numbers 2 c and 2 c + 1 are the
  // Box-Muller pair from Bits(c).
  void Normals(uint64_t first, absl::Span<float> out) const;

  // Parameters for devices that compute Bits themselves: Bits(c) is the first 64 bits of the Philox block with key() at
  // the counter {c, nonce()}.
  std::array<uint32_t, 2> key() const { return key_; }
  uint64_t nonce() const { return nonce_; }

 private:
  std::array<uint32_t, 2> key_;
  uint64_t nonce_;
};

}  // namespace precondor
