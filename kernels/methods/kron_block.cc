// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kron_block.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor {
namespace {

// Returns |x A'| for the unit vector x along A_i A, with A_i the longest row of A: at most the spectral norm of A, and
// seldom less than 0.7 of it. Returns 0 for A = 0. a [n, n] is symmetric. Source:
// norm_lower_bound of Li's psgd_torch. Errors: FailedPrecondition for NaN or infinity; the backend's. Scratch: 2 n
// elements.
absl::StatusOr<double> NormLowerBound(Backend& backend, ConstMatrixView a) {
  std::vector<double> squares(a.rows);
  PRECONDOR_RETURN_IF_ERROR(backend.RowSquaredNorms(a, absl::MakeSpan(squares)));
  for (const double square : squares) {
    if (!std::isfinite(square)) {
      return absl::FailedPreconditionError("a factor's gradient: expected finite elements, got NaN or infinity");
    }
  }
  constexpr double kNegligible = 1e-70;  // squared length whose reciprocal would exceed f32
  const auto longest = std::max_element(squares.begin(), squares.end());
  if (longest == squares.end() || *longest < kNegligible) return 0.0;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix rows, backend.Allocate(2, a.cols));
  const MatrixView x = rows.view().RowRange(0, 1), y = rows.view().RowRange(1, 1);
  // Normalised vectors, because the product of two of A's elements could overflow f32.
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1 / std::sqrt(*longest), a.RowRange(longest - squares.begin(), 1), 0.0, y));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, y, Transpose::kNo, a, Transpose::kNo, 0.0, x));
  PRECONDOR_ASSIGN_OR_RETURN(const double length, backend.Dot(x, x));
  if (length < kNegligible) return 0.0;
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1 / std::sqrt(length), x, 0.0, x));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, x, Transpose::kNo, a, Transpose::kYes, 0.0, y));
  PRECONDOR_ASSIGN_OR_RETURN(const double square, backend.Dot(y, y));
  return std::sqrt(square);
}

absl::StatusOr<KronSide> MakeSide(int64_t size, bool diagonal, double scale, Backend& backend) {
  KronSide side;
  side.size = size;
  if (diagonal) {
    side.diagonal.assign(size, scale);
    return side;
  }
  PRECONDOR_ASSIGN_OR_RETURN(side.matrix, backend.Allocate(size, size));
  PRECONDOR_RETURN_IF_ERROR(backend.AddDiagonal(scale, side.matrix.view()));
  return side;
}

absl::StatusOr<KronSide> CloneSide(const KronSide& side, Backend& backend) {
  KronSide copy;
  copy.size = side.size;
  copy.diagonal = side.diagonal;
  if (side.is_diagonal()) return copy;
  PRECONDOR_ASSIGN_OR_RETURN(copy.matrix, backend.Allocate(side.size, side.size));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(side.matrix.view(), copy.matrix.view()));
  return copy;
}

// Multiplies the tensor by op(Q) along the mode: op(Q) X from the left, X op(Q)' from the right.
absl::Status Multiply(Backend& backend, const KronSide& q, Transpose transpose, ModeMatrix& along) {
  const MatrixView x = along.view();
  const bool left = along.side() == From::kLeft;
  if (q.is_diagonal()) return left ? backend.ScaleRows(q.diagonal, x, x) : backend.ScaleColumns(q.diagonal, x, x);
  const Transpose op = left ? transpose : Transpose(transpose == Transpose::kNo);
  return backend.TriangularMultiply(along.side(), q.matrix.view(), op, x);
}

// Multiplies the tensor by Q^-T along the mode.
absl::Status SolveTransposed(Backend& backend, const KronSide& q, ModeMatrix& along) {
  const MatrixView x = along.view();
  const bool left = along.side() == From::kLeft;
  if (!q.is_diagonal()) return backend.TriangularSolve(along.side(), q.matrix.view(), Transpose(left), x);
  std::vector<double> reciprocals = q.diagonal;
  for (double& element : reciprocals) element = 1 / element;
  return left ? backend.ScaleRows(reciprocals, x, x) : backend.ScaleColumns(reciprocals, x, x);
}

// Returns |x_i|^2 of every row or column of x.
absl::StatusOr<std::vector<double>> SideSquaredNorms(Backend& backend, From from, ConstMatrixView x) {
  std::vector<double> norms(from == From::kLeft ? x.rows : x.cols);
  PRECONDOR_RETURN_IF_ERROR(from == From::kLeft ? backend.RowSquaredNorms(x, absl::MakeSpan(norms))
                                                : backend.ColumnSquaredNorms(x, absl::MakeSpan(norms)));
  for (const double norm : norms) {
    if (!std::isfinite(norm)) {
      return absl::FailedPreconditionError("a factor's gradient: expected finite elements, got NaN or infinity");
    }
  }
  return norms;
}

// gram = x x' or x' x.
absl::Status Gram(Backend& backend, From from, ConstMatrixView x, MatrixView gram) {
  const bool left = from == From::kLeft;
  return backend.Gemm(1.0, x, Transpose(!left), x, Transpose(left), 0.0, gram);
}

// Q <- Q - lr / |T1 + T2| triu(T1 - T2) Q for T1 = A A', T2 = B B' of the side.
absl::Status StepSide(double lr, Backend& backend, From from, ConstMatrixView a, ConstMatrixView b, KronSide& q) {
  if (q.is_diagonal()) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<double> t1, SideSquaredNorms(backend, from, a));
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<double> t2, SideSquaredNorms(backend, from, b));
    double largest = 0;
    for (size_t i = 0; i < t1.size(); ++i) largest = std::max(largest, t1[i] + t2[i]);
    for (size_t i = 0; i < t1.size() && largest > 0; ++i) q.diagonal[i] *= 1 - lr / largest * (t1[i] - t2[i]);
    return absl::OkStatus();
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix sum, backend.Allocate(q.size, q.size));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix difference, backend.Allocate(q.size, q.size));
  PRECONDOR_RETURN_IF_ERROR(Gram(backend, from, a, sum.view()));
  PRECONDOR_RETURN_IF_ERROR(Gram(backend, from, b, difference.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1.0, difference.view(), 1.0, sum.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1.0, sum.view(), -2.0, difference.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const double norm, NormLowerBound(backend, sum.view()));
  if (norm == 0) return absl::OkStatus();
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix step, backend.Allocate(q.size, q.size));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(q.matrix.view(), step.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.TriangularMultiply(From::kLeft, difference.view(), Transpose::kNo, step.view()));
  return backend.Axpby(-lr / norm, step.view(), 1.0, q.matrix.view());
}

absl::StatusOr<double> Largest(Backend& backend, const KronSide& side) {
  if (!side.is_diagonal()) return backend.AbsoluteMaximum(side.matrix.view());
  return *std::max_element(side.diagonal.begin(), side.diagonal.end());
}

absl::Status Scale(Backend& backend, double factor, KronSide& side) {
  for (double& element : side.diagonal) element *= factor;
  if (side.is_diagonal()) return absl::OkStatus();
  return backend.Axpby(factor, side.matrix.view(), 0.0, side.matrix.view());
}

absl::Status SaveSide(Backend& backend, const KronSide& side, StateWriter& out) {
  out.Number(0);  // unused, as in the states of variant TRIANGULAR, the only one that remains
  out.Numbers(side.diagonal);
  return out.Matrix(backend, side.matrix.view());
}

absl::Status LoadSide(Backend& backend, absl::string_view name, StateReader& in, KronSide& side) {
  PRECONDOR_RETURN_IF_ERROR(in.Number(absl::StrCat(name, " unused number")).status());
  PRECONDOR_ASSIGN_OR_RETURN(std::vector<double> diagonal, in.Numbers(absl::StrCat(name, " diagonal")));
  if (diagonal.size() != side.diagonal.size()) {
    return absl::FailedPreconditionError(absl::StrCat("layer state: ", name, " diagonal: expected ",
                                                      side.diagonal.size(), " numbers, got ", diagonal.size()));
  }
  side.diagonal = std::move(diagonal);
  return in.Matrix(name, backend, side.matrix.view());
}

}  // namespace

double KronConfig::UpdateProbability(uint64_t n) const {
  const double annealed =
      max_update_probability * std::exp(-update_decay * (static_cast<double>(n) - update_flat_steps));
  return std::clamp(annealed, min_update_probability, max_update_probability);
}

std::vector<bool> KronConfig::Diagonal(const std::vector<int64_t>& sides, size_t ndim) const {
  const bool all = memory_save_mode == MemorySaveMode::kAllDiag || static_cast<int64_t>(ndim) < min_ndim_triangular;
  double elements = 1;
  for (const int64_t side : sides) elements *= static_cast<double>(side);
  std::vector<bool> diagonal;
  for (const int64_t side : sides) {
    const double square = static_cast<double>(side) * static_cast<double>(side);
    diagonal.push_back(all || side == 1 || side > max_size_triangular ||
                       (max_skew > 0 && square > max_skew * elements));
  }
  if (memory_save_mode == MemorySaveMode::kOneDiag) {
    // The longest side has the largest factor; among equals the last side counts.
    const auto longest = std::max_element(sides.rbegin(), sides.rend());
    diagonal[sides.rend() - longest - 1] = true;
  }
  return diagonal;
}

std::vector<int64_t> KronConfig::Blocks(int64_t size, bool diagonal) const {
  const int64_t longest = diagonal || block_size == 0 ? size : block_size;
  const int64_t count = (size + longest - 1) / longest;
  std::vector<int64_t> sizes(count, size / count);
  for (int64_t i = 0; i < size % count; ++i) ++sizes[i];
  return sizes;
}

absl::StatusOr<KronConfig> ParseKronConfig(const MethodConfig& config) {
  PRECONDOR_ASSIGN_OR_RETURN(KronConfig out, ParseOptions(config, ReadKronConfig));
  if (out.min_update_probability > out.max_update_probability) {
    return absl::InvalidArgumentError(absl::StrCat("method kron: option min_update_probability: expected at most ",
                                                   out.max_update_probability, ", max_update_probability, got ",
                                                   out.min_update_probability));
  }
  return out;
}

absl::StatusOr<KronBlock> KronBlock::Make(const KronConfig& config, const KronSides& sides, Backend& backend) {
  const double scale = std::pow(config.init_scale, 1 / static_cast<double>(sides.sizes.size()));
  KronBlock block(sides);
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    PRECONDOR_ASSIGN_OR_RETURN(block.factors_.emplace_back(),
                               MakeSide(sides.sizes[mode], sides.diagonal[mode], scale, backend));
  }
  return block;
}

absl::StatusOr<KronBlock> KronBlock::Clone(Backend& backend) const {
  KronBlock copy(sides_);
  for (const KronSide& side : factors_) {
    PRECONDOR_ASSIGN_OR_RETURN(copy.factors_.emplace_back(), CloneSide(side, backend));
  }
  return copy;
}

absl::Status KronBlock::Apply(Backend& backend, MatrixView x) const {
  for (size_t mode = 0; mode < factors_.size(); ++mode) {
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix along, Mode(mode, x, backend));
    for (const Transpose transpose : {Transpose::kNo, Transpose::kYes}) {
      PRECONDOR_RETURN_IF_ERROR(Multiply(backend, factors_[mode], transpose, along));
    }
    PRECONDOR_RETURN_IF_ERROR(along.WriteBack(backend));
  }
  return absl::OkStatus();
}

absl::Status KronBlock::Balance(Backend& backend) {
  std::vector<double> norms;
  double sum = 0;  // sum of the norms' logarithms
  for (const KronSide& side : factors_) {
    PRECONDOR_ASSIGN_OR_RETURN(const double norm, Largest(backend, side));
    if (!(norm > 0 && std::isfinite(norm))) {
      return absl::FailedPreconditionError(absl::StrCat("balance: expected positive finite norms, got ", norm));
    }
    norms.push_back(norm);
    sum += std::log(norm);
  }
  const double mean = std::exp(sum / static_cast<double>(norms.size()));
  for (size_t mode = 0; mode < factors_.size(); ++mode) {
    PRECONDOR_RETURN_IF_ERROR(Scale(backend, mean / norms[mode], factors_[mode]));
  }
  return absl::OkStatus();
}

// Replaces g by A, which is g times Q along each mode, and v by B, which is v times Q^-T. For two sides:
// A = Q_L G Q_R', B = Q_L^-T V Q_R^-1.
absl::Status KronBlock::Update(double lr, Backend& backend, MatrixView g, MatrixView v) {
  for (size_t mode = 0; mode < factors_.size(); ++mode) {
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix of_g, Mode(mode, g, backend));
    PRECONDOR_RETURN_IF_ERROR(Multiply(backend, factors_[mode], Transpose::kNo, of_g));
    PRECONDOR_RETURN_IF_ERROR(of_g.WriteBack(backend));
  }
  for (size_t mode = 0; mode < factors_.size(); ++mode) {
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix of_v, Mode(mode, v, backend));
    PRECONDOR_RETURN_IF_ERROR(SolveTransposed(backend, factors_[mode], of_v));
    PRECONDOR_RETURN_IF_ERROR(of_v.WriteBack(backend));
  }
  for (size_t mode = 0; mode < factors_.size(); ++mode) {
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix a, Mode(mode, g, backend));
    PRECONDOR_ASSIGN_OR_RETURN(ModeMatrix b, Mode(mode, v, backend));
    PRECONDOR_RETURN_IF_ERROR(StepSide(lr, backend, a.side(), a.view(), b.view(), factors_[mode]));
  }
  return absl::OkStatus();
}

absl::Status KronBlock::Save(Backend& backend, StateWriter& out) const {
  for (const KronSide& side : factors_) PRECONDOR_RETURN_IF_ERROR(SaveSide(backend, side, out));
  return absl::OkStatus();
}

absl::Status KronBlock::Load(Backend& backend, StateReader& in) {
  for (size_t mode = 0; mode < factors_.size(); ++mode) {
    PRECONDOR_RETURN_IF_ERROR(LoadSide(backend, absl::StrCat("factor ", mode), in, factors_[mode]));
  }
  return absl::OkStatus();
}

int64_t KronBlock::StateElements(const KronSides& sides) {
  int64_t sum = 0;
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    sum += sides.diagonal[mode] ? 0 : sides.sizes[mode] * sides.sizes[mode];
  }
  return sum;
}

int64_t KronBlock::ScratchElements(const KronSides& sides) {
  int64_t d = 0;
  for (size_t mode = 0; mode < sides.sizes.size(); ++mode) {
    if (!sides.diagonal[mode]) d = std::max(d, sides.sizes[mode]);
  }
  const int64_t mode = sides.sizes.size() > 2 ? sides.elements() : 0;  // copy of a mode between others
  return 3 * d * d + 2 * d + 2 * mode;
}

}  // namespace precondor
