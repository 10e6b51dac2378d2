// SPDX-License-Identifier: Apache-2.0
// What a dense inverse takes without any of our forms.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor {

// Each d x d matrix of `all`, which lie one below the other, by gemv + scal + ger + amax with the vector [1, d]. The
// last maximum, so that none of it is left out.
float NaiveUpdates(int64_t d, MatrixView all, ConstMatrixView vector);

}  // namespace precondor
