// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/naive_linear_algebra.h"

#include <cmath>
#include <utility>

namespace precondor::reference {

Matrix Identity(int64_t n) {
  Matrix out(n, n);
  for (int64_t i = 0; i < n; ++i) out.at(i, i) = 1;
  return out;
}

Matrix Transposed(const Matrix& a) {
  Matrix out(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) out.at(j, i) = a.at(i, j);
  }
  return out;
}

Matrix Product(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      for (int64_t j = 0; j < b.cols; ++j) out.at(i, j) += a.at(i, k) * b.at(k, j);
    }
  }
  return out;
}

Matrix Combination(double alpha, const Matrix& a, double beta, const Matrix& b) {
  Matrix out(a.rows, a.cols);
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] = alpha * a.data[i] + beta * b.data[i];
  return out;
}

double FrobeniusNorm(const Matrix& a) {
  double sum = 0;
  for (double x : a.data) sum += x * x;
  return std::sqrt(sum);
}

Matrix Inverse(const Matrix& a) {
  const int64_t n = a.rows;
  Matrix work = a, out = Identity(n);
  for (int64_t column = 0; column < n; ++column) {
    int64_t pivot = column;
    for (int64_t i = column + 1; i < n; ++i) {
      if (std::fabs(work.at(i, column)) > std::fabs(work.at(pivot, column))) pivot = i;
    }
    for (int64_t j = 0; j < n; ++j) {
      std::swap(work.at(column, j), work.at(pivot, j));
      std::swap(out.at(column, j), out.at(pivot, j));
    }
    const double scale = 1.0 / work.at(column, column);
    for (int64_t j = 0; j < n; ++j) {
      work.at(column, j) *= scale;
      out.at(column, j) *= scale;
    }
    for (int64_t i = 0; i < n; ++i) {
      if (i == column) continue;
      const double factor = work.at(i, column);
      for (int64_t j = 0; j < n; ++j) {
        work.at(i, j) -= factor * work.at(column, j);
        out.at(i, j) -= factor * out.at(column, j);
      }
    }
  }
  return out;
}

}  // namespace precondor::reference
