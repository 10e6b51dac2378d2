// SPDX-License-Identifier: Apache-2.0
// A factor as a scaled identity plus a low-rank matrix, never d x d: O(r d) memory and update.
// The state is M = sum_j w_j c_j c_j' with unit vectors c_j (rows of a [r, d] matrix), weights w_j in f64 and the Gram
// matrix of the c_j. Derivation: docs/develop/math/low_rank.md.
//   EXACT_DAMPED:      J = (M/m + (tail/(d m) + lambda tr/(d m)) I)^-1, m = 1 - gamma^t, by Woodbury's identity
//   REFERENCE, BLEND:  J = I - M
//   PUBLISHED:         J = e I + M
#pragma once

#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"

#include "kernels/methods/factor.h"

namespace precondor {

class LowRankFactor final : public Factor {
 public:
  static absl::StatusOr<std::unique_ptr<Factor>> Make(const MkorConfig& config, int64_t d, uint64_t phase,
                                                      Backend& backend);
  static int64_t StateBytes(const MkorConfig& config, int64_t d);
  static int64_t ScratchBytes(const MkorConfig& config, int64_t d, int64_t k);

  using Factor::Prepare;
  absl::Status Prepare(ConstMatrixView vectors, absl::Span<const double> squares) override;
  void Commit() override;
  void Abandon() override;
  absl::Status Save(StateWriter& out) const override;
  absl::Status PrepareLoad(StateReader& in) override;
  absl::StatusOr<FactorInverse> Inverse() const override;
  void ForgetInverse() override { core_kept_ = false; }
  bool low_rank() const override { return true; }
  int64_t rank() const override { return static_cast<int64_t>(weights_.size()); }
  double damping() const override;
  int64_t bytes() const override;

 private:
  // State that Commit adopts. Rows that are appended in place go where no weight is, so that no code reads them before
  // Commit.
  struct Staged {
    std::vector<double> weights;
    double tail = 0;
    double mass = 0;         // 1 - gamma^t
    double mean_square = 0;  // BLEND: EMA of |v|^2
    double identity = 1;     // PUBLISHED: e
    bool replaces = false;
    // Set if `replaces`.
    DeviceMatrix vectors;
    DeviceMatrix gram;
    bool discard_next = false;
    bool recompressed = false;
  };
  using Slots = absl::InlinedVector<int64_t, 16>;
  // New terms of M: row i has weights[i]. Rows need not be unit vectors.
  struct Terms {
    DeviceMatrix rows;
    PerVector weights;
  };

  LowRankFactor(const MkorConfig& config, int64_t d, uint64_t phase, Backend& backend)
      : config_(config), d_(d), phase_(phase), backend_(backend) {}
  int64_t RetainedRank(int64_t k, const Staged& next) const;
  absl::Status UpdateExact(ConstMatrixView vectors, PerVector squares, Staged& next);
  absl::Status UpdateShermanMorrison(ConstMatrixView vectors, const PerVector& squares, Staged& next);
  absl::Status UpdatePublished(ConstMatrixView vectors, Staged& next);
  absl::StatusOr<Terms> ShermanMorrisonTerms(ConstMatrixView vectors, double scale, Staged& next);
  absl::StatusOr<double> LargestDiagonal(double identity, const std::vector<double>& weights, Staged& next);
  // u = alpha v + beta v M for the M that `next` describes.
  absl::Status Multiply(double alpha, double beta, ConstMatrixView v, Staged& next, MatrixView u);
  // Adds the terms to M, at most as many at a time as the factor has columns. squares: |row|^2 of each.
  absl::Status Add(ConstMatrixView rows, PerVector squares, PerVector weights, Staged& next);
  absl::StatusOr<PerVector> SquaresOf(ConstMatrixView rows) const;
  absl::Status Append(ConstMatrixView rows, absl::Span<const double> scales, absl::Span<const double> weights,
                      Staged& next);
  Slots FreeSlots(int64_t k, const Staged& next) const;
  void RetireNegligible(int64_t k, Staged& next) const;
  absl::Status Recompress(ConstMatrixView rows, absl::Span<const double> weights, Staged& next);
  // The rows of [old; new][old; new]' that belong to the new ones, [k, n + k].
  absl::Status GramRows(ConstMatrixView old_rows, ConstMatrixView new_rows, MatrixView rows) const;
  MatrixView Vectors(Staged& next) { return next.replaces ? next.vectors.view() : vectors_.view(); }
  // Packed Gram matrix of the first n rows.
  MatrixView Gram(Staged& next, int64_t n);
  double Trace() const;
  double Damping() const;
  // EXACT_DAMPED: computes S into `core`, and its roots into roots_.
  absl::Status MakeCore(double mu, MatrixView core) const;

  const MkorConfig config_;
  const int64_t d_;
  const uint64_t phase_;
  Backend& backend_;
  // [r, d]. The first weights_.size() rows are in use, except rows of weight 0.
  DeviceMatrix vectors_;
  // Lower triangle of [r, r], packed, with rows in use as for vectors_.
  DeviceMatrix gram_;
  std::vector<double> weights_;
  double tail_ = 0;  // trace of what recompression dropped, decayed like the weights
  double mass_ = 0;
  double mean_square_ = 0;
  double identity_ = 1;
  bool discard_next_ = false;
  bool recompressed_ = false;  // at least once
  Staged staged_;
  // Buffers of a recompression, for all columns and for those that are kept.
  std::vector<double> all_weights_, all_roots_, all_values_, kept_values_, kept_scales_;
  // Results of Inverse: the roots or the core's diagonal. A core that the factor keeps stays valid until J changes.
  mutable std::vector<double> roots_;
  mutable DeviceMatrix core_;  // packed
  mutable bool core_kept_ = false;
};

}  // namespace precondor
