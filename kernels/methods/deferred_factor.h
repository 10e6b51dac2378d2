// SPDX-License-Identifier: Apache-2.0
// A dense factor under the rules whose updates add a few rank-1 terms: REFERENCE, BLEND, PUBLISHED.
//   J = e I + s M + sum_i w_i r_i r_i'
// M is symmetric, in tiles, in f32 or f16; e and s are scalars, so that no pass over M decays or blends it; at most
// kDeferred terms wait beside it. They go into M when the next update would not fit, in the same pass in which that
// update multiplies. The diagonal of J is kept in f64 at O(d) an update: J is positive definite, so that its largest
// element is there. Derivation: docs/methods/mkor.md, "Dense".
#pragma once

#include <memory>
#include <vector>

#include "kernels/methods/factor.h"
#include "kernels/methods/sherman_morrison.h"

namespace precondor {

class DeferredFactor final : public Factor {
 public:
  static constexpr int64_t kDeferred = 16;
  struct Scalars : RuleScalars {
    double identity = 1;  // e
    double scale = 1;     // s
    std::vector<double> weights;
  };

  static absl::StatusOr<std::unique_ptr<Factor>> Make(const MkorConfig& config, int64_t d, Backend& backend);
  static int64_t StateBytes(const MkorConfig& config, int64_t d);
  static int64_t ScratchBytes(const MkorConfig& config, int64_t d, int64_t k);
  // Of what Save wrote after "tiles"; the terms that wait and M follow. Errors: those of StateReader.
  static absl::StatusOr<Scalars> ReadScalars(StateReader& in, int64_t d);

  using Factor::Prepare;
  absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) override;
  bool PreparesInBatch(int64_t k) const override;
  absl::Status Conclude() override;
  void Commit() override;
  // Terms that Prepare has moved into M stay there: the J of this factor is the same, and so are the bits of what the
  // next Prepare of as many vectors computes.
  void Abandon() override;
  absl::Status Save(StateWriter& out) const override;
  absl::Status PrepareLoad(StateReader& in) override;
  absl::StatusOr<FactorInverse> Inverse() const override;
  bool low_rank() const override { return false; }
  int64_t rank() const override { return 0; }
  double damping() const override { return 0.0; }
  int64_t bytes() const override { return StateBytes(config_, d_); }

 private:
  DeferredFactor(const MkorConfig& config, int64_t d, Backend& backend);
  // Longer steps than kDeferred vectors cannot wait beside M; they change a copy of it.
  bool has_next() const { return !next_matrix_.empty(); }
  SymmetricMatrix& matrix() { return has_next() ? next_matrix_ : matrix_; }
  MatrixView rows() { return has_next() ? next_rows_.view() : rows_.view(); }
  ConstMatrixView Waiting(const Scalars& scalars) const;
  absl::Status AllocateNext();
  absl::Status ShermanMorrison(ConstMatrixView vectors, double scale);
  absl::Status Published(ConstMatrixView vectors);
  // u = v M, after moving what waits into M where less than `room` is left beside it.
  absl::Status MultiplyStored(ConstMatrixView v, int64_t room, MatrixView u);
  // J <- decay J + shift I.
  void Blend(double decay, double shift);
  // J as next_ has it, for AddTheRest and Backend::ShermanMorrisonTerms.
  SymmetricForm Form() const;
  // J <- J + sign sum_i terms_i terms_i'.
  absl::Status Append(double sign, ConstMatrixView terms);
  absl::Status LoadFull(StateReader& in);

  const MkorConfig config_;
  const int64_t d_;
  const double unit_;  // s when nothing has decayed: f16 wants elements near 1, and those of J - I are near 1/d
  Backend& backend_;
  SymmetricMatrix matrix_;
  DeviceMatrix rows_;  // [kDeferred, d]; what Prepare appends lies behind the rows in use, which alone are read
  Scalars scalars_;
  // Made by Prepare, adopted by Commit.
  Scalars next_;
  SymmetricMatrix next_matrix_;  // with has_next()
  DeviceMatrix next_rows_;
  std::vector<double> squares_;  // of the columns of terms that are appended, [d]
  bool concluded_ = true;        // whether squares_ are in next_.diagonal
};

}  // namespace precondor
