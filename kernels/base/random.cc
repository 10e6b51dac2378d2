// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/random.h"

#include <cmath>
#include <numbers>

namespace precondor {
namespace {

uint64_t Join(uint32_t low, uint32_t high) { return (uint64_t{high} << 32) | low; }

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kMultiplier0} * counter[0];
    const uint64_t p1 = uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

CounterRandom::CounterRandom(absl::Span<const uint64_t> key_words) : key_{0, 0}, nonce_(0) {
  // Each word is the counter of one block whose key is the digest so far. The length comes last.
  const auto absorb = [this](uint64_t word) {
    const auto block = Philox4x32({static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32),
                                   static_cast<uint32_t>(nonce_), static_cast<uint32_t>(nonce_ >> 32)},
                                  key_);
    key_ = {block[0], block[1]};
    nonce_ = Join(block[2], block[3]);
  };
  for (uint64_t word : key_words) absorb(word);
  absorb(key_words.size());
}

uint64_t CounterRandom::Bits(uint64_t counter) const {
  const auto block = Philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                                 static_cast<uint32_t>(nonce_), static_cast<uint32_t>(nonce_ >> 32)},
                                key_);
  return Join(block[0], block[1]);
}

void CounterRandom::Normals(uint64_t first, absl::Span<float> out) const {
  for (size_t i = 0; i < out.size();) {
    const uint64_t number = first + i, bits = Bits(number / 2);
    const double uniform = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;  // in (0, 1): the logarithm is finite
    const double angle = 2 * std::numbers::pi * 0x1p-32 * static_cast<double>(static_cast<uint32_t>(bits));
    const double radius = std::sqrt(-2 * std::log(uniform));
    if (number % 2 == 0) out[i++] = static_cast<float>(radius * std::cos(angle));
    if (i < out.size()) out[i++] = static_cast<float>(radius * std::sin(angle));
  }
}

}  // namespace precondor
