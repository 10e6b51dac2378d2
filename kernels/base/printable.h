// SPDX-License-Identifier: Apache-2.0
// Text of peers for terminals and logs: a name must not move the cursor, begin a line or turn the direction of a line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace precondor {

// The code point that a text in UTF-8 begins with.
struct CodePoint {
  size_t bytes = 1;
  uint32_t value = 0xfffd;  // U+FFFD for a byte that begins no code point
  bool printable = false;   // false for such a byte, a control character, a line separator or a mark of direction
};
// Precondition: `text` is not empty.
CodePoint FirstCodePoint(absl::string_view text);

// Returns `text` with "\uXXXX" for each character that is not printable.
std::string Printable(absl::string_view text);

}  // namespace precondor
