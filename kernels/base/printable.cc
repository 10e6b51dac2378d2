// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/printable.h"

#include "absl/strings/str_format.h"

namespace precondor {
namespace {

bool IsPrintable(uint32_t c) {
  const bool control = c < 0x20 || (c >= 0x7f && c < 0xa0);
  const bool separator = c == 0x2028 || c == 0x2029;
  const bool direction =
      c == 0x061c || c == 0x200e || c == 0x200f || (c >= 0x202a && c <= 0x202e) || (c >= 0x2066 && c <= 0x2069);
  return !control && !separator && !direction;
}

}  // namespace

CodePoint FirstCodePoint(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t bytes = first < 0x80 ? 1 : first >= 0xc2 && first < 0xe0 ? 2 : first >= 0xe0 && first < 0xf0 ? 3 : 4;
  if (bytes > text.size() || first > 0xf4 || (first >= 0x80 && first < 0xc2)) return {};
  uint32_t value = bytes == 1 ? first : first & (0x7f >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLowest[] = {0, 0, 0x80, 0x800, 0x10000};  // by number of bytes
  if (value < kLowest[bytes] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) return {};
  return {.bytes = bytes, .value = value, .printable = IsPrintable(value)};
}

std::string Printable(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    const CodePoint next = FirstCodePoint(text);
    if (next.printable) {
      out.append(text.data(), next.bytes);
    } else {
      absl::StrAppendFormat(&out, "\\u%04x", next.value);
    }
    text.remove_prefix(next.bytes);
  }
  return out;
}

}  // namespace precondor
