// SPDX-License-Identifier: Apache-2.0
#include "server/store/crc32c.h"

#include <algorithm>

#include <isa-l/crc.h>

namespace precondor::store {

uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes) {
  constexpr size_t kMost = size_t{1} << 30;  // the library's length is an int
  crc = ~crc;
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kMost);
    // The library only reads; its parameter lacks the const.
    auto* const data = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
    crc = crc32_iscsi(data, static_cast<int>(count), crc);
    bytes.remove_prefix(count);
  }
  return ~crc;
}

}  // namespace precondor::store
