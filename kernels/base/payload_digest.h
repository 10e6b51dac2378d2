// SPDX-License-Identifier: Apache-2.0
// A digest of f32 elements that does not depend on where or in which order it is computed: a shard computes it from
// bytes that a socket delivered, a device from its own memory. It gives no protection against adversaries.
#pragma once

#include <cstdint>
#include <cstring>

namespace precondor {

// Returns the term of element `index` with these bits. The digest is the sum of all terms modulo 2^64.
constexpr uint64_t PayloadTerm(uint64_t index, uint32_t bits) {
  uint64_t h = (index + 1) * 0x9e3779b97f4a7c15u ^ bits;
  h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
  h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
  return h ^ h >> 32;
}

// Returns the digest of `elements` little-endian f32 elements in host memory, the first with index `first`. `bytes`
// needs no alignment.
inline uint64_t PayloadDigest(const uint8_t* bytes, int64_t elements, int64_t first = 0) {
  uint64_t digest = 0;
  for (int64_t i = 0; i < elements; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes + i * 4, 4);
    digest += PayloadTerm(static_cast<uint64_t>(first + i), bits);
  }
  return digest;
}

}  // namespace precondor
