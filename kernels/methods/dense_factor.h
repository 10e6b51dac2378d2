// SPDX-License-Identifier: Apache-2.0
// A factor under EXACT_DAMPED as two d x d matrices, L (divided by its mean eigenvalue) and J. It is the exact form
// against which the low-rank form is measured, and the better one for small d.
#pragma once

#include <memory>
#include <vector>

#include "kernels/methods/factor.h"

namespace precondor {

class DenseFactor final : public Factor {
 public:
  static absl::StatusOr<std::unique_ptr<Factor>> Make(const MkorConfig& config, int64_t d, Backend& backend);
  static int64_t StateBytes(int64_t d);
  static int64_t ScratchBytes(int64_t d, int64_t k);

  using Factor::Prepare;
  absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) override;
  void Commit() override;
  void Abandon() override;
  absl::Status Save(StateWriter& out) const override;
  absl::Status PrepareLoad(StateReader& in) override;
  absl::StatusOr<FactorInverse> Inverse() const override;
  bool low_rank() const override { return false; }
  int64_t rank() const override { return 0; }
  double damping() const override;
  int64_t bytes() const override { return StateBytes(d_); }

 private:
  struct Scalars {
    double scale = 0;  // L = scale * covariance_
    double mass = 0;   // 1 - gamma^t
  };
  DenseFactor(const MkorConfig& config, int64_t d, Backend& backend) : config_(config), d_(d), backend_(backend) {}

  const MkorConfig config_;
  const int64_t d_;
  Backend& backend_;
  DeviceMatrix covariance_;
  DeviceMatrix inverse_;
  Scalars scalars_;
  // Made by Prepare, adopted by Commit.
  DeviceMatrix next_covariance_;
  DeviceMatrix next_inverse_;
  Scalars next_;
};

}  // namespace precondor
