// SPDX-License-Identifier: Apache-2.0
// Matrices in the memory of a backend's device. Backend makes them.
#pragma once

#include <cstdint>

#include "kernels/base/matrix_view.h"
#include "kernels/base/symmetric_tiles.h"

namespace precondor {

class Backend;

// Owns device memory for one f32 matrix. Must not outlive its backend.
class DeviceMatrix {
 public:
  DeviceMatrix() = default;
  DeviceMatrix(DeviceMatrix&& other) noexcept;
  DeviceMatrix& operator=(DeviceMatrix&& other) noexcept;
  ~DeviceMatrix();

  bool empty() const { return view_.data == nullptr; }
  int64_t rows() const { return view_.rows; }
  int64_t cols() const { return view_.cols; }
  MatrixView view() { return view_; }
  ConstMatrixView view() const { return view_; }

 private:
  friend class Backend;
  friend class SymmetricMatrix;
  DeviceMatrix(Backend* backend, MatrixView view) : backend_(backend), view_(view) {}
  Backend* backend_ = nullptr;
  MatrixView view_;
};

// A symmetric n x n matrix in device memory, in tiles (kernels/base/symmetric_tiles.h), initially zero.
class SymmetricMatrix {
 public:
  SymmetricMatrix() = default;
  bool empty() const { return tiles_.empty(); }
  int64_t n() const { return n_; }
  SymmetricStorage storage() const { return storage_; }
  // The raw memory as rows of 32 f32, whatever the storage: for copying and saving, not for computing.
  MatrixView raw() { return tiles_.view(); }
  ConstMatrixView raw() const { return tiles_.view(); }
  // Returns a view of another matrix' memory that owns nothing.
  static SymmetricMatrix Showing(MatrixView raw, int64_t n, SymmetricStorage storage) {
    SymmetricMatrix shown;
    shown.tiles_.view_ = raw;
    shown.n_ = n;
    shown.storage_ = storage;
    return shown;
  }

 private:
  friend class Backend;
  DeviceMatrix tiles_;
  int64_t n_ = 0;
  SymmetricStorage storage_ = SymmetricStorage::kF32;
};

}  // namespace precondor
