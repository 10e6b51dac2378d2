// SPDX-License-Identifier: Apache-2.0
// A row-major f32 matrix that owns its memory, for the examples' own arithmetic.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/matrix_view.h"

namespace precondor::digits {

// Zeroed at birth.
class HostMatrix {
 public:
  HostMatrix() = default;
  HostMatrix(int64_t rows, int64_t cols) : rows_(rows), cols_(cols), data_(static_cast<size_t>(rows * cols)) {}

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  MatrixView view() { return MatrixView(data_.data(), rows_, cols_); }
  ConstMatrixView view() const { return ConstMatrixView(data_.data(), rows_, cols_); }
  std::vector<float>& data() { return data_; }
  const std::vector<float>& data() const { return data_; }

 private:
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<float> data_;
};

}  // namespace precondor::digits
