// SPDX-License-Identifier: Apache-2.0
// oneDNN's products, on the calling thread alone: each call sets its OpenMP team to one thread and restores the size
// afterwards. Without oneDNN in the build the functions return kNone and false.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/base/matrix_view.h"

namespace precondor::onednn {

// The instruction set that oneDNN uses on this processor. kNone: oneDNN is not faster than a BLAS here.
enum class Isa : uint8_t { kNone, kAvx2, kAvx512 };
Isa ProcessorIsa();

// c = alpha op(a) op(b) + beta c. Returns false, with c unchanged, if it cannot.
bool Sgemm(float alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, float beta,
           MatrixView c);

}  // namespace precondor::onednn
