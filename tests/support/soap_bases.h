// SPDX-License-Identifier: Apache-2.0
// The bases that soap's first gradient makes, for tests that compare with tests/reference/soap.h.
#pragma once

#include <cstdint>
#include <gtest/gtest.h>
#include <vector>

#include "kernels/backend.h"
#include "kernels/methods/tensor.h"
#include "tests/reference/soap.h"
#include "tests/support/method_driver.h"

namespace precondor {

// The tensor as the matrix [d, the rest], for its last dimension [the rest, d].
inline reference::Dense Unfolded(const reference::Tensor& x, size_t mode) {
  const int64_t d = x.dims[mode], rest = static_cast<int64_t>(x.data.size()) / d;
  const int64_t inner = ElementsOf(absl::MakeConstSpan(x.dims).subspan(mode + 1));
  reference::Dense out(d, rest);
  for (int64_t n = 0; n < d * rest; ++n) out.at(n / inner % d, n / (inner * d) * inner + n % inner) = x.data[n];
  return inner == 1 ? reference::Transposed(out) : out;
}

// The eigenvectors of (1 - decay) g g' (or g' g) along each dimension as the backend finds them, falling, as columns:
// where g is rank-deficient rounding chooses some of them, and the oracle has to go on from the same.
inline std::vector<reference::Dense> FirstBases(Backend& backend, const reference::SoapOptions& options,
                                                const reference::Vector& first,
                                                ProductPrecision precision = ProductPrecision::kF32) {
  reference::Tensor x(options.dims);
  x.data = first;
  std::vector<reference::Dense> bases;
  for (size_t mode = 0; mode < options.dims.size(); ++mode) {
    const reference::Dense g = Unfolded(x, mode);
    const int64_t n = options.dims[mode];
    const bool left = g.rows == n && (g.cols != n || mode + 1 < options.dims.size());
    const std::vector<float> values(g.data.begin(), g.data.end());
    DeviceMatrix device = backend.Allocate(g.rows, g.cols).value(), covariance = backend.Allocate(n, n).value(),
                 vectors = backend.Allocate(n, n).value();
    EXPECT_TRUE(backend.Upload(ConstMatrixView(values.data(), g.rows, g.cols), device.view()).ok());
    EXPECT_TRUE(backend
                    .Gemm(1 - options.covariance_decay, device.view(), Transpose(!left), device.view(), Transpose(left),
                          0.0, covariance.view(), precision)
                    .ok());
    std::vector<double> eigenvalues(n);
    EXPECT_TRUE(backend.SymmetricEigen(covariance.view(), absl::MakeSpan(eigenvalues), vectors.view()).ok());
    const reference::Vectors rows = ToHost(backend, vectors.view());
    reference::Dense& basis = bases.emplace_back(n, n);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t i = 0; i < n; ++i) basis.at(i, j) = rows[n - 1 - j][i];
    }
  }
  return bases;
}

}  // namespace precondor
