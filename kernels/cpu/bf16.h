// SPDX-License-Identifier: Apache-2.0
// A dense precondition with products of bf16 numbers and sums in f32, by oneDNN on processors that have such products.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"

namespace precondor::cpu {

// False without oneDNN in the build, or AVX512_BF16 in the processor: the others can then not be used.
bool KnowsBf16();

// Floats of scratch for d [m, n].
int64_t Bf16Scratch(int64_t m, int64_t n);

// u = l d r with l, r, d and l d rounded to bf16. False, with u unspecified, when oneDNN refuses. `scratch` has
// Bf16Scratch elements, 64-byte aligned, whatever is in them.
bool Bf16Precondition(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, float* scratch, MatrixView u);

}  // namespace precondor::cpu
