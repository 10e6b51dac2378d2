// SPDX-License-Identifier: Apache-2.0
// Matrix products on one thread, each by the library that a measured table gives as the faster one for its shape on
// this processor: OpenBLAS, or oneDNN if the build has it. docs/develop/lab/kernels.md says how the table was measured.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"

namespace precondor::cpu {

enum class GemmLibrary : uint8_t { kBlas, kOneDnn };

// c = alpha op(a) op(b) + beta c, with Backend::Gemm's preconditions and no empty matrix. Safe from any thread.
void Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, double beta,
          MatrixView c);

// Gemm whose result is symmetric, as is c if beta is not 0. Computes the lower triangle of a large matrix by blocks and
// mirrors it, which takes little more than half of Gemm's time.
void SymmetricGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                   double beta, MatrixView c);

// Returns the library that Gemm uses for a product [m, inner] [inner, n] -> [m, n].
GemmLibrary ChooseGemm(int64_t m, int64_t n, int64_t inner, Transpose transpose_a, Transpose transpose_b);

// Computes the product of Gemm with one library, whether or not it is the faster one; for measurements and tests.
// Returns false, with c unchanged, if the library cannot.
bool GemmBy(GemmLibrary library, double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
            Transpose transpose_b, double beta, MatrixView c);

}  // namespace precondor::cpu
