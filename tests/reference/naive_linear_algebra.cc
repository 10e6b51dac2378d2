// SPDX-License-Identifier: Apache-2.0
#include "tests/reference/naive_linear_algebra.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace precondor::reference {

Dense Transposed(const Dense& a) {
  Dense out(a.cols, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) out.at(j, i) = a.at(i, j);
  }
  return out;
}

Dense Combination(double alpha, const Dense& a, double beta, const Dense& b) {
  Dense out(a.rows, a.cols);
  for (size_t i = 0; i < out.data.size(); ++i) out.data[i] = alpha * a.data[i] + beta * b.data[i];
  return out;
}

double FrobeniusNorm(const Dense& a) {
  double sum = 0;
  for (double x : a.data) sum += x * x;
  return std::sqrt(sum);
}

Dense Identity(int64_t n) {
  Dense a(n, n);
  for (int64_t i = 0; i < n; ++i) a.at(i, i) = 1.0;
  return a;
}

Dense Product(const Dense& a, const Dense& b) {
  Dense c(a.rows, b.cols);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t k = 0; k < a.cols; ++k) {
      for (int64_t j = 0; j < b.cols; ++j) c.at(i, j) += a.at(i, k) * b.at(k, j);
    }
  }
  return c;
}

double Trace(const Dense& a) {
  double sum = 0;
  for (int64_t i = 0; i < a.rows; ++i) sum += a.at(i, i);
  return sum;
}

double LargestElement(const Dense& a) {
  double largest = 0;
  for (double element : a.data) largest = std::max(largest, std::abs(element));
  return largest;
}

Dense SpdInverse(const Dense& a) {
  const int64_t n = a.rows;
  Dense c(n, n);  // a = c c', c lower triangular
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = a.at(i, j);
      for (int64_t k = 0; k < j; ++k) sum -= c.at(i, k) * c.at(j, k);
      if (i == j && !(sum > 0)) {
        std::fprintf(stderr, "reference: a matrix of dimension %lld is not positive definite\n",
                     static_cast<long long>(n));
        std::abort();
      }
      c.at(i, j) = i == j ? std::sqrt(sum) : sum / c.at(j, j);
    }
  }
  Dense inverse(n, n);
  Vector x(n);
  for (int64_t column = 0; column < n; ++column) {
    for (int64_t i = 0; i < n; ++i) {
      double sum = i == column ? 1.0 : 0.0;
      for (int64_t k = column; k < i; ++k) sum -= c.at(i, k) * x[k];
      x[i] = i < column ? 0.0 : sum / c.at(i, i);
    }
    for (int64_t i = n - 1; i >= 0; --i) {
      double sum = x[i];
      for (int64_t k = i + 1; k < n; ++k) sum -= c.at(k, i) * x[k];
      x[i] = sum / c.at(i, i);
      inverse.at(i, column) = x[i];
    }
  }
  return inverse;
}

Vector SymmetricEigenvalues(Dense a) {
  const int64_t n = a.rows;
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        all += a.at(i, j) * a.at(i, j);
        if (i != j) off += a.at(i, j) * a.at(i, j);
      }
    }
    if (off <= 1e-30 * all) break;
    for (int64_t p = 0; p < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        if (a.at(p, q) == 0.0) continue;
        const double theta = (a.at(q, q) - a.at(p, p)) / (2.0 * a.at(p, q));
        const double t = (theta >= 0 ? 1.0 : -1.0) / (std::abs(theta) + std::sqrt(theta * theta + 1.0));
        const double c = 1.0 / std::sqrt(t * t + 1.0), s = t * c;
        for (int64_t k = 0; k < n; ++k) {
          const double x = a.at(k, p), y = a.at(k, q);
          a.at(k, p) = c * x - s * y;
          a.at(k, q) = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = a.at(p, k), y = a.at(q, k);
          a.at(p, k) = c * x - s * y;
          a.at(q, k) = s * x + c * y;
        }
      }
    }
  }
  Vector values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = a.at(i, i);
  std::sort(values.begin(), values.end());
  return values;
}

}  // namespace precondor::reference
