// SPDX-License-Identifier: Apache-2.0
// One vector into a factor, and what a dense inverse takes without any of our forms.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"
#include "kernels/methods/mkor.h"

namespace precondor {

// Both abort where the backend refuses.
DeviceMatrix OneRow(Backend& backend, const std::vector<float>& elements);
void UpdateOnce(Factor& factor, ConstMatrixView vector);

// Each d x d matrix of `all`, which lie one below the other, by gemv + scal + ger + amax with the vector [1, d]. The
// last maximum, so that none of it is left out.
float NaiveUpdates(int64_t d, MatrixView all, ConstMatrixView vector);

}  // namespace precondor
