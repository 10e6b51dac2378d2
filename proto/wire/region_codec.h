// SPDX-License-Identifier: Apache-2.0
// Encodes and checks descriptions of shared regions, which the protocol calls rings. Pure functions; thread-safe.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "precondor/v1/precondition.pb.h"

namespace precondor::wire {

// Describes a region of `bytes` in the memory of the CUDA device `device`. `handle` is empty unless the region exists.
v1::Ring EncodeRegion(const std::string& device, uint64_t bytes, const std::string& handle = "");
// Checks that a request or a granted ring is in the memory of this CUDA device and has more than 0 bytes. Returns
// InvalidArgument (MALFORMED) with the difference if not.
absl::Status CheckRegion(const v1::Ring& got, const std::string& device);

}  // namespace precondor::wire
