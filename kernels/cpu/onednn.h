// SPDX-License-Identifier: Apache-2.0
// oneDNN's products, on the calling thread alone: each call sets its OpenMP team to one thread and restores the size
// afterwards. Without oneDNN in the build all functions return kNone or false.
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

bool ProcessorHasBf16();

// Layout of the second matrix [k, n] of Bf16Product: blocks of kPackedColumns columns, one after another. Within a
// block the rows come in pairs, and the two elements of a column in a pair are adjacent. k is padded with zeros to a
// multiple of kPackedRows, and n to a multiple of kPackedColumns. 64-byte aligned.
constexpr int64_t kPackedRows = 32, kPackedColumns = 64;

// c [m, n] = a b, summed in f32 and rounded to bf16 in the first form. a [m, k], and c in the first form, have no gaps
// between rows. Returns false, with c unspecified, if it cannot.
bool Bf16Product(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b, uint16_t* c);
bool Bf16Product(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b, MatrixView c);

}  // namespace precondor::onednn
