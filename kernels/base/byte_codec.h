// SPDX-License-Identifier: Apache-2.0
// Encodes and decodes little-endian numbers and length-prefixed bytes, the primitives of the file formats.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace precondor {

inline void PutFixed(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}
inline void PutU32(std::string& out, uint32_t value) { PutFixed(out, value, 4); }
inline void PutU64(std::string& out, uint64_t value) { PutFixed(out, value, 8); }
inline void PutBytes(std::string& out, absl::string_view bytes) {
  PutU64(out, bytes.size());
  out.append(bytes.data(), bytes.size());
}

// Reads values from the front of a byte string. A read beyond the end returns zero or an empty string, and from then on
// ok() is false.
class Decoder {
 public:
  explicit Decoder(absl::string_view bytes) : rest_(bytes) {}
  uint8_t U8() { return static_cast<uint8_t>(Fixed(1)); }
  uint32_t U32() { return static_cast<uint32_t>(Fixed(4)); }
  uint64_t U64() { return Fixed(8); }
  absl::string_view Bytes() { return Take(U64()); }
  absl::string_view Take(uint64_t count) {
    if (!ok_ || count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const absl::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  // Returns the next `bytes` bytes, at most 8, as a number.
  uint64_t Fixed(int bytes) {
    const absl::string_view taken = Take(static_cast<uint64_t>(bytes));
    uint64_t value = 0;
    for (size_t i = taken.size(); i > 0; --i) value = value << 8 | static_cast<uint8_t>(taken[i - 1]);
    return value;
  }
  void Fail() { ok_ = false; }  // the caller found a value invalid
  bool ok() const { return ok_; }
  bool done() const { return ok_ && rest_.empty(); }
  size_t left() const { return rest_.size(); }

 private:
  absl::string_view rest_;
  bool ok_ = true;
};

}  // namespace precondor
