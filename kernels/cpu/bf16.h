// SPDX-License-Identifier: Apache-2.0
// Dense preconditioning with products of bf16 numbers and sums in f32, by oneDNN on processors that support such
// products.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor::cpu {

// Returns whether the build has oneDNN and the processor AVX512_BF16. If not, do not call the other functions.
bool SupportsBf16();

// Returns the floats of scratch for d [m, n].
int64_t Bf16Scratch(int64_t m, int64_t n);

// u = l d r with l, r, d and l d rounded to bf16. Returns false, with u unspecified, if oneDNN refuses. `scratch` has
// Bf16Scratch elements, 64-byte aligned, of any contents.
bool Bf16Precondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, float* scratch, MatrixView u);

}  // namespace precondor::cpu
