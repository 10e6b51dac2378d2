// SPDX-License-Identifier: Apache-2.0
// Backend's operations on symmetric matrices by the kernels of symmetric_tiles.h. Arguments as Backend has checked
// them; the backend gives scratch, and its memory is the host's.
#pragma once

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "kernels/backend.h"

namespace precondor::tiles {

absl::Status SymmetricUpdateMultiply(Backend& backend, double scale, double shift, absl::Span<const double> weights,
                                     ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v, MatrixView y);
absl::Status SymmetricExpand(Backend& backend, double scale, double shift, absl::Span<const double> weights,
                             ConstMatrixView rows, const SymmetricMatrix& m, MatrixView x);
void SymmetricCompress(ConstMatrixView x, SymmetricMatrix& m);

}  // namespace precondor::tiles
