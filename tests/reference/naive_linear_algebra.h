// SPDX-License-Identifier: Apache-2.0
// Matrices of doubles and the loops that define the operations on them. Slow and short; shares nothing with kernels/.
#pragma once

#include <cstdint>
#include <vector>

namespace precondor::reference {

using Vector = std::vector<double>;

// Square or rectangular, row-major.
struct Dense {
  int64_t rows = 0, cols = 0;
  Vector data;
  Dense() = default;
  Dense(int64_t rows, int64_t cols, double value = 0.0) : rows(rows), cols(cols), data(rows * cols, value) {}
  double& at(int64_t i, int64_t j) { return data[i * cols + j]; }
  double at(int64_t i, int64_t j) const { return data[i * cols + j]; }
};

Dense Identity(int64_t n);
Dense Transposed(const Dense& a);
Dense Product(const Dense& a, const Dense& b);
// alpha a + beta b.
Dense Combination(double alpha, const Dense& a, double beta, const Dense& b);
inline Dense Scaled(double factor, const Dense& a) { return Combination(factor, a, 0.0, a); }
double FrobeniusNorm(const Dense& a);
double Trace(const Dense& a);
// Returns the greatest magnitude.
double LargestElement(const Dense& a);
// Inverts a symmetric positive definite matrix by Cholesky; aborts when it is not.
Dense SpdInverse(const Dense& a);
// Eigenvalues of a symmetric matrix, ascending, by cyclic Jacobi rotations.
Vector SymmetricEigenvalues(Dense a);

}  // namespace precondor::reference
