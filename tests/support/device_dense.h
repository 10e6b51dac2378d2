// SPDX-License-Identifier: Apache-2.0
// Matrices of tests/reference on a device and back, also in the midst of guards.
#pragma once

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/backend.h"
#include "tests/reference/naive_linear_algebra.h"

namespace precondor {

// Frobenius' norm of a - b.
inline double Distance(const reference::Dense& a, const reference::Dense& b) {
  return reference::FrobeniusNorm(reference::Combination(1, a, -1, b));
}

inline DeviceMatrix OnDevice(Backend& backend, const reference::Dense& x) {
  const std::vector<float> host(x.data.begin(), x.data.end());
  DeviceMatrix device = backend.Allocate(x.rows, x.cols).value();
  EXPECT_TRUE(backend.Upload(ConstMatrixView(host.data(), x.rows, x.cols), device.view()).ok());
  return device;
}

inline reference::Dense OnHost(Backend& backend, ConstMatrixView x) {
  std::vector<float> host(x.rows * x.cols);
  EXPECT_TRUE(backend.Download(x, MatrixView(host.data(), x.rows, x.cols)).ok());
  reference::Dense out(x.rows, x.cols);
  out.data.assign(host.begin(), host.end());
  return out;
}

// A device matrix inside a larger one whose other elements are guards: the view has a stride and neighbours that no
// operation may touch.
class GuardedMatrix {
 public:
  GuardedMatrix(Backend& backend, const reference::Dense& values)
      : backend_(backend), rows_(values.rows), cols_(values.cols) {
    reference::Dense all(rows_ + 2, cols_ + 3, kGuard);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) all.at(i + 1, j + 1) = values.at(i, j);
    }
    storage_ = OnDevice(backend, all);
  }
  MatrixView view() {
    const MatrixView all = storage_.view();
    return MatrixView(all.row(1) + 1, rows_, cols_, all.stride);
  }
  // The values; fails the test when a guard has changed.
  reference::Dense Read() const {
    const reference::Dense all = OnHost(backend_, storage_.view());
    reference::Dense out(rows_, cols_);
    for (int64_t i = 0; i < all.rows; ++i) {
      for (int64_t j = 0; j < all.cols; ++j) {
        if (i >= 1 && i <= rows_ && j >= 1 && j <= cols_) {
          out.at(i - 1, j - 1) = all.at(i, j);
        } else {
          EXPECT_EQ(all.at(i, j), kGuard) << "guard at " << i << ", " << j;
        }
      }
    }
    return out;
  }

 private:
  static constexpr double kGuard = 12345;
  Backend& backend_;
  int64_t rows_, cols_;
  DeviceMatrix storage_;
};

}  // namespace precondor
