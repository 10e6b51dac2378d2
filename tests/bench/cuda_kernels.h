// SPDX-License-Identifier: Apache-2.0
// Measures the CUDA backend's hot operations, and the limits that they are compared with: a copy in device memory, and
// products by cuBLAS. The device's own clock measures them (cuda_timer.h). Each operation's result is first
// compared with doubles; a wrong one is an error.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/cuda_step.h"
#include "tests/bench/cuda_timer.h"

namespace precondor {

class CudaKernels {
 public:
  explicit CudaKernels(BenchMode mode);

  // What the device allows: the rows of "limit/cuda/". The other rows have a limit only once this has succeeded.
  absl::StatusOr<std::vector<BenchRow>> MeasureLimits();
  // An update of a dense factor in tiles: "update/cuda/f32/d:1024".
  absl::StatusOr<BenchRow> SymmetricUpdate(int64_t n, SymmetricStorage storage);
  // The products of a dense precondition: "precondition/cuda/dense_bf16/d:1024".
  absl::StatusOr<BenchRow> DensePrecondition(int64_t n, ProductPrecision precision);
  static std::string NameOfUpdate(int64_t n, SymmetricStorage storage);
  static std::string NameOfPrecondition(int64_t n, ProductPrecision precision);

  DeviceLimits limits() const { return {copied_per_second_, f32_per_second_, bf16_per_second_}; }
  absl::Status fault() const { return backend_->fault(); }

 private:
  absl::StatusOr<Summary> Time(const std::function<absl::Status()>& work) const;
  absl::StatusOr<Summary> TimeBf16Gemm(int64_t n) const;
  absl::StatusOr<DeviceMatrix> Normal(int64_t rows, int64_t cols, uint64_t seed) const;
  absl::StatusOr<DeviceMatrix> Symmetric(int64_t n, uint64_t seed) const;
  absl::StatusOr<std::vector<float>> ToHost(ConstMatrixView x) const;
  absl::Status CheckSymmetricUpdate(int64_t n, SymmetricStorage storage) const;

  const BenchMode mode_;
  const std::unique_ptr<Backend> backend_;
  double copied_per_second_ = 0, f32_per_second_ = 0, bf16_per_second_ = 0;
};

}  // namespace precondor
