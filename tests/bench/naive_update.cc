// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/naive_update.h"

#include <cblas.h>
#include <vector>

#include "kernels/base/check.h"

namespace precondor {

DeviceMatrix OneRow(Backend& backend, const std::vector<float>& elements) {
  const int64_t n = static_cast<int64_t>(elements.size());
  DeviceMatrix row = backend.Allocate(1, n).value();
  PRECONDOR_CHECK(backend.Upload(ConstMatrixView(elements.data(), 1, n), row.view()).ok());
  return row;
}

void UpdateOnce(Factor& factor, ConstMatrixView vector) {
  PRECONDOR_CHECK(factor.Prepare(vector).ok() && factor.Conclude().ok());
  factor.Commit();
}

float NaiveUpdates(int64_t d, MatrixView all, ConstMatrixView vector) {
  const int n = static_cast<int>(d);
  std::vector<float> product(d);
  size_t largest = 0;
  for (int64_t i = 0; i < all.rows; i += d) {
    float* j = all.row(i);
    cblas_sgemv(CblasRowMajor, CblasNoTrans, n, n, 1, j, n, vector.data, 1, 0, product.data(), 1);
    cblas_sscal(n * n, 0.95f, j, 1);
    cblas_sger(CblasRowMajor, n, n, 1e-6f, product.data(), 1, product.data(), 1, j, n);
    largest = cblas_isamax(d * d, j, 1);
  }
  return static_cast<float>(largest);
}

}  // namespace precondor
