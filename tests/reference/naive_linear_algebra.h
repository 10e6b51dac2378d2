// SPDX-License-Identifier: Apache-2.0
// Matrices of doubles and the loops that define the operations of Backend. Slow, short, and nothing shared with it.
#pragma once

#include <cstdint>
#include <vector>

namespace precondor::reference {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> data;
  Matrix() = default;
  Matrix(int64_t rows, int64_t cols, double value = 0) : rows(rows), cols(cols), data(rows * cols, value) {}
  double& at(int64_t i, int64_t j) { return data[i * cols + j]; }
  double at(int64_t i, int64_t j) const { return data[i * cols + j]; }
};

Matrix Identity(int64_t n);
Matrix Transposed(const Matrix& a);
Matrix Product(const Matrix& a, const Matrix& b);
// alpha a + beta b.
Matrix Combination(double alpha, const Matrix& a, double beta, const Matrix& b);
double FrobeniusNorm(const Matrix& a);
// Gauss-Jordan with partial pivoting; a must be regular.
Matrix Inverse(const Matrix& a);

}  // namespace precondor::reference
