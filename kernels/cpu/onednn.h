// SPDX-License-Identifier: Apache-2.0
// oneDNN's products, in the calling thread alone: its OpenMP team is set to one thread for the length of a call, and
// back after it. Without oneDNN in the build nothing here can do anything.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"

namespace precondor::onednn {

// What oneDNN makes of this processor; kNone: it has nothing here that is faster than a BLAS.
enum class Isa : uint8_t { kNone, kAvx2, kAvx512 };
Isa ProcessorIsa();

// c = alpha op(a) op(b) + beta c. False, with c as it was, when it cannot.
bool Sgemm(float alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, float beta,
           MatrixView c);

}  // namespace precondor::onednn
