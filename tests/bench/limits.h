// SPDX-License-Identifier: Apache-2.0
// The rates of one core at which it multiplies and adds in f32, reads, and reads and writes in place, when it does
// nothing else; and one vector into a factor.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"
#include "kernels/methods/mkor.h"

namespace precondor {

// Some tens of microseconds of fused multiply-adds with the widest vectors that this processor has; returns their FLOP.
double RunFmas();

float ReadAll(const float* data, int64_t count);
void ScaleAll(float* data, int64_t count);

// Both abort where the backend refuses.
DeviceMatrix OneRow(Backend& backend, const std::vector<float>& elements);
void UpdateOnce(Factor& factor, ConstMatrixView vector);

}  // namespace precondor
