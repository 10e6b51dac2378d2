// SPDX-License-Identifier: Apache-2.0
// Matrix products of one thread, each by the library that a measured table says is the faster for its shape on this
// processor: OpenBLAS, or oneDNN where the build has it. How the table was measured: docs/performance.md.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"

namespace precondor::cpu {

enum class GemmLibrary : uint8_t { kBlas, kOneDnn };

// c = alpha op(a) op(b) + beta c, with Backend::Gemm's conditions and no empty matrix. Any thread.
void Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, double beta,
          MatrixView c);

// What Gemm takes for a product [m, inner] [inner, n] -> [m, n].
GemmLibrary ChooseGemm(int64_t m, int64_t n, int64_t inner, Transpose transpose_a, Transpose transpose_b);

// The same by one library, whether or not it is the faster: to measure and to test. False, with c as it was,
// when it cannot.
bool GemmBy(GemmLibrary library, double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
            Transpose transpose_b, double beta, MatrixView c);

}  // namespace precondor::cpu
