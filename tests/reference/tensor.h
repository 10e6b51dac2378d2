// SPDX-License-Identifier: Apache-2.0
// Tensors of any number of dimensions in f64, index by index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"

namespace precondor::reference {

// Row-major.
struct Tensor {
  std::vector<int64_t> dims;
  Vector data;
  Tensor() = default;
  explicit Tensor(std::vector<int64_t> dims);
};

// sum_j q_ij x_(..., j, ...), j in place `mode`.
Tensor ModeProduct(const Dense& q, size_t mode, const Tensor& x);
// sum x_(..., i, ...) x_(..., j, ...) over all other places.
Dense ModeGram(const Tensor& x, size_t mode);
// Element i along the mode becomes that of order[i].
Tensor ModeReordered(const std::vector<int64_t>& order, size_t mode, const Tensor& x);

}  // namespace precondor::reference
