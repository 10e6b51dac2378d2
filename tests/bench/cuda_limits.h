// SPDX-License-Identifier: Apache-2.0
// The limits of a device, which steps are compared with: a copy in its memory, and products by cuBLAS, by its own clock
// (cuda_timer.h).
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/cuda_step.h"
#include "tests/bench/cuda_timer.h"

namespace precondor {

class CudaLimits {
 public:
  explicit CudaLimits(BenchMode mode);

  // The rows of "limit/cuda/". Other rows have a limit only once this has succeeded.
  absl::StatusOr<std::vector<BenchRow>> Measure();

  DeviceLimits found() const { return {copied_per_second_, f32_per_second_, bf16_per_second_}; }
  absl::Status fault() const { return backend_->fault(); }

 private:
  absl::StatusOr<Summary> Time(const std::function<absl::Status()>& work) const;
  absl::StatusOr<Summary> TimeBf16Gemm(int64_t n) const;
  absl::StatusOr<DeviceMatrix> Normal(int64_t rows, int64_t cols, uint64_t seed) const;

  const BenchMode mode_;
  const std::unique_ptr<Backend> backend_;
  double copied_per_second_ = 0, f32_per_second_ = 0, bf16_per_second_ = 0;
};

}  // namespace precondor
