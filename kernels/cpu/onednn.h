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

bool ProcessorHasBf16();

// A matrix [k, n] of bf16 numbers as Bf16Product takes its second one: blocks of kPackedColumns columns one after the
// other, in each the rows in pairs, of a pair the two elements of each column beside each other; k filled up to a
// multiple of kPackedRows and n of kPackedColumns with zeros. 64-byte aligned.
constexpr int64_t kPackedRows = 32, kPackedColumns = 64;

// c [m, n] = a b in f32, rounded to bf16 where c is. a [m, k], and c where it is bf16, without gaps between rows. False
// when it cannot; c is then unspecified.
bool Bf16Product(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b, uint16_t* c);
bool Bf16Product(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* packed_b, MatrixView c);

}  // namespace precondor::onednn
