// SPDX-License-Identifier: Apache-2.0
// Method soap in f64, one formula after the other in the order of the published code (docs/use/methods/soap.md), for
// tensors of any number of dimensions. Slow and plain; nothing here is shared with the code under test.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"
#include "tests/reference/tensor.h"

namespace precondor::reference {

struct SoapOptions {
  double beta1 = 0.95;
  double beta2 = 0.95;
  double covariance_decay = 0.95;
  double epsilon = 1e-8;
  int64_t interval = 10;
  std::vector<int64_t> dims = {};
  std::vector<bool> factor = {};  // which of them have one
};

class Soap {
 public:
  // The bases that the first gradient makes, one a dimension, eigenvectors as columns by falling eigenvalue: a
  // rank-deficient one leaves the choice of some of them open.
  Soap(SoapOptions options, std::vector<Dense> first_bases);
  // The answer to the next gradient, both row-major.
  Vector Step(const Vector& d);

 private:
  Tensor Project(const Tensor& x) const;
  Tensor Back(const Tensor& x) const;
  void Refresh();

  const SoapOptions options_;
  std::vector<Dense> bases_, covariances_;
  Tensor momentum_, second_;
  int64_t steps_ = -1;  // of Adam
};

class Shampoo {
 public:
  explicit Shampoo(SoapOptions options);
  Vector Step(const Vector& d);

 private:
  Dense Root(const Dense& covariance, double power) const;

  const SoapOptions options_;
  std::vector<Dense> covariances_, roots_;
  Tensor momentum_;
  int64_t steps_ = 0;
};

// Eigenvectors of a symmetric matrix as columns, by falling eigenvalue, by cyclic Jacobi rotations.
Dense FallingEigenvectors(const Dense& a, Vector* values = nullptr);
// The columns of a, made orthonormal from the first to the last (Gram and Schmidt, twice).
Dense OrthonormalColumns(const Dense& a);

}  // namespace precondor::reference
