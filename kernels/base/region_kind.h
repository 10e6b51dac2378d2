// SPDX-License-Identifier: Apache-2.0
// Kinds of memory that two processes of one host can share for payloads.
#pragma once

#include <cstdint>

namespace precondor {

// Values are those of precondor.v1.RingKind, whose MESSAGES is no kind of payloads; proto/wire checks that.
enum class RegionKind : uint8_t {
  kCuda = 1,  // device memory that another process opens by its CUDA IPC handle
};

}  // namespace precondor
