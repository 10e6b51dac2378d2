// SPDX-License-Identifier: Apache-2.0
// f32 values as they travel.
#pragma once

#include <cstring>
#include <vector>

#include "server/core/api/contribution.h"

namespace precondor::sim {

inline Payload Encode(const std::vector<float>& values) {
  Payload bytes(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace precondor::sim
