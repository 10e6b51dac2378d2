// SPDX-License-Identifier: Apache-2.0
// Method soap in f64, one formula after the other in the order of the published code (docs/methods/soap.md). Slow and
// plain; nothing here is shared with the code under test.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

struct SoapOptions {
  double beta1 = 0.95;
  double beta2 = 0.95;
  double covariance_decay = 0.95;
  double epsilon = 1e-8;
  int64_t interval = 10;
  bool left = true;  // the sides that have a factor
  bool right = true;
};

class Soap {
 public:
  // The bases that the first gradient makes, eigenvectors as columns by falling eigenvalue: a rank-deficient one leaves
  // the choice of some of them open.
  Soap(SoapOptions options, Dense first_left, Dense first_right);
  Dense Step(const Dense& d);

 private:
  Dense Project(const Dense& x) const;
  Dense Back(const Dense& x) const;
  void Refresh();

  const SoapOptions options_;
  Dense left_basis_, right_basis_, left_, right_, momentum_, second_;
  int64_t steps_ = -1;  // of Adam
};

class Shampoo {
 public:
  explicit Shampoo(SoapOptions options) : options_(options) {}
  Dense Step(const Dense& d);

 private:
  Dense Root(const Dense& covariance, double power) const;

  const SoapOptions options_;
  Dense left_, right_, left_root_, right_root_, momentum_;
  int64_t steps_ = 0;
};

// Eigenvectors of a symmetric matrix as columns, by falling eigenvalue, by cyclic Jacobi rotations.
Dense FallingEigenvectors(const Dense& a, Vector* values = nullptr);
// The columns of a, made orthonormal from the first to the last (Gram and Schmidt, twice).
Dense OrthonormalColumns(const Dense& a);

}  // namespace precondor::reference
