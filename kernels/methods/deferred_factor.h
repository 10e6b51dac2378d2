// SPDX-License-Identifier: Apache-2.0
// A dense factor under the rules whose updates add a few rank-1 terms: REFERENCE, BLEND, PUBLISHED.
//   J = e I + s M + sum_i w_i r_i r_i'
// M is symmetric, in tiles, in f32 or f16; e and s are scalars, so that decaying or blending J needs no pass over M. At
// most kDeferred terms are deferred, that is, kept beside M. If the next update's terms would not fit, the deferred
// terms are added to M in the pass in which that update multiplies by M. The diagonal of J is kept in f64, at O(d) per
// update: J is positive definite, so its largest element is on the diagonal. Derivation: docs/use/methods/mkor.md,
// "Dense".
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/backend.h"
#include "kernels/methods/factor.h"
#include "kernels/methods/state_codec.h"

namespace precondor {

// State of a factor under the rules REFERENCE and BLEND (docs/use/methods/mkor.md), in addition to J's elements. With
// H = gamma J + (1-gamma) I, an update is J <- H - sum_i r_i r_i' for a few terms r_i.
struct RuleScalars {
  double mass = 0;               // BLEND: 1 - gamma^t
  double mean_square = 0;        // BLEND: EMA of |v|^2
  bool discard_next = false;     // REFERENCE: discard the first vectors
  std::vector<double> diagonal;  // of J; reveals a J that is not positive definite

  // Writes all fields but the diagonal.
  void Write(StateWriter& out) const;
  absl::Status Read(StateReader& in);
};

// Returns FailedPrecondition unless all elements are finite and not negative.
absl::Status CheckDiagonal(const std::vector<double>& diagonal);

// Returns the mean of |v|^2, from `squares` unless that is empty. Returns InvalidArgument if the mean is not finite.
absl::StatusOr<double> MeanSquare(ConstMatrixView vectors, absl::Span<const double> squares, Backend& backend);

// Returns the number by which the rule multiplies each of k vectors of this mean square. For BLEND it also advances the
// averages in `scalars`.
double VectorScale(const MkorConfig& config, int64_t d, int64_t k, double mean_square, RuleScalars& scalars);

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
  // Reads the scalars that Save wrote after "tiles"; the deferred terms and M follow. Errors: those of StateReader.
  static absl::StatusOr<Scalars> ReadScalars(StateReader& in, int64_t d);

  using Factor::Prepare;
  absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) override;
  bool PreparesInBatch(int64_t k) const override;
  absl::Status Conclude() override;
  void Commit() override;
  // Deferred terms that Prepare has added to M stay there: J is unchanged, and so are the bits that the next Prepare of
  // as many vectors computes.
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
  // A step of more than kDeferred vectors changes a copy of M, because its terms do not fit beside M.
  bool has_next() const { return !next_matrix_.empty(); }
  SymmetricMatrix& matrix() { return has_next() ? next_matrix_ : matrix_; }
  MatrixView rows() { return has_next() ? next_rows_.view() : rows_.view(); }
  ConstMatrixView Waiting(const Scalars& scalars) const;
  absl::Status AllocateNext();
  absl::Status ShermanMorrison(ConstMatrixView vectors, double scale);
  absl::Status Published(ConstMatrixView vectors);
  // Computes u = v M. First adds the deferred terms to M if there is space for fewer than `room` more.
  absl::Status MultiplyStored(ConstMatrixView v, int64_t room, MatrixView u);
  // J <- decay J + shift I.
  void Blend(double decay, double shift);
  // Returns the J that next_ describes, for ApplyImplicitTerms and Backend::ShermanMorrisonTerms.
  SymmetricForm Form() const;
  // J <- J + sign sum_i terms_i terms_i'.
  absl::Status Append(double sign, ConstMatrixView terms);

  const MkorConfig config_;
  const int64_t d_;
  // The value of s before any decay. With f16 storage, the elements of M should be near 1, and those of J - I are near
  // 1/d.
  const double unit_;
  Backend& backend_;
  SymmetricMatrix matrix_;
  // [kDeferred, d]. Prepare appends behind the rows in use, and only rows in use are read.
  DeviceMatrix rows_;
  Scalars scalars_;
  // Made by Prepare, adopted by Commit.
  Scalars next_;
  SymmetricMatrix next_matrix_;  // set if has_next()
  DeviceMatrix next_rows_;
  std::vector<double> squares_;  // squared norms of the columns of appended terms, [d]
  bool concluded_ = true;        // whether next_.diagonal includes squares_
};

}  // namespace precondor
