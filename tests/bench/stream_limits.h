// SPDX-License-Identifier: Apache-2.0
// The rates at which one core reads, and reads and writes in place, when it does nothing else. `count` is a multiple
// of 64.
#pragma once

#include <cstdint>

namespace precondor {

float ReadAll(const float* data, int64_t count);
void ScaleAll(float* data, int64_t count);

}  // namespace precondor
