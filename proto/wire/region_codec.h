// SPDX-License-Identifier: Apache-2.0
// Descriptions of shared regions, which the wire calls rings. Pure functions; thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "kernels/base/region_kind.h"
#include "precondor/v1/precondition.pb.h"

namespace precondor::wire {

// A region of `bytes` in the memory `device`; `handle` only of one that exists.
v1::Ring EncodeRegion(RegionKind kind, const std::string& device, uint64_t bytes, const std::string& handle = "");
// Whether the peer's request, or its grant, is of the memory that was offered, or asked for, and has bytes.
// InvalidArgument (MALFORMED) says what differs.
absl::Status CheckRegion(const v1::Ring& got, RegionKind kind, const std::string& device);

}  // namespace precondor::wire
