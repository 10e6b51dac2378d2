// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli, RFC 3720 appendix B.4) by Intel's ISA-L, which selects the processor's fastest instructions.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace precondor::store {

// Continues a checksum: that of the concatenation of a and b is ExtendCrc32c(Crc32c(a), b).
uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes);
inline uint32_t Crc32c(absl::string_view bytes) { return ExtendCrc32c(0, bytes); }

}  // namespace precondor::store
