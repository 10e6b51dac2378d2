// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/kron_block.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/methods/norm_bound.h"

namespace precondor {
namespace {

// Of PROCRUSTES: how fast the bound of the gradient's norm falls, and the largest rotation of one step.
constexpr double kSmoothnessDecay = 0.9;
constexpr double kLargestRotation = 0.125;

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
  copy.smoothness = side.smoothness;
  if (side.is_diagonal()) return copy;
  PRECONDOR_ASSIGN_OR_RETURN(copy.matrix, backend.Allocate(side.size, side.size));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(side.matrix.view(), copy.matrix.view()));
  return copy;
}

// x = op(Q) x or x op(Q).
absl::Status Multiply(const KronConfig& config, Backend& backend, From from, const KronSide& q, Transpose transpose,
                      MatrixView x) {
  if (q.is_diagonal()) {
    return from == From::kLeft ? backend.ScaleRows(q.diagonal, x, x) : backend.ScaleColumns(q.diagonal, x, x);
  }
  if (config.variant == KronVariant::kTriangular) {
    return backend.TriangularMultiply(from, q.matrix.view(), transpose, x);
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix copy, backend.Allocate(x.rows, x.cols));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(x, copy.view()));
  if (from == From::kLeft) {
    return backend.Gemm(1.0, q.matrix.view(), transpose, copy.view(), Transpose::kNo, 0.0, x);
  }
  return backend.Gemm(1.0, copy.view(), Transpose::kNo, q.matrix.view(), transpose, 0.0, x);
}

std::vector<double> Reciprocals(const std::vector<double>& values) {
  std::vector<double> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = 1 / values[i];
  return out;
}

// |x_i|^2 of every row or column of x.
absl::StatusOr<std::vector<double>> SquaredNorms(Backend& backend, From from, ConstMatrixView x) {
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
absl::Status StepTriangular(double lr, Backend& backend, From from, ConstMatrixView a, ConstMatrixView b, KronSide& q) {
  if (q.is_diagonal()) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<double> t1, SquaredNorms(backend, from, a));
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<double> t2, SquaredNorms(backend, from, b));
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

// Q <- exp(a R) Q to second order for R = (Q' - Q) / |Q' - Q|, which is the rotation that brings Q nearest to being
// symmetric positive definite; a by line search. R is skew, so that tr(R X) = -<R, X>.
absl::Status Rotate(Backend& backend, MatrixView q) {
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix r, backend.Allocate(q.rows, q.cols));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(q, r.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Symmetrize(r.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(-2.0, q, 2.0, r.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const double norm, NormLowerBound(backend, r.view()));
  if (norm == 0) return absl::OkStatus();
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(1 / norm, r.view(), 0.0, r.view()));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix rq, backend.Allocate(q.rows, q.cols));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix rrq, backend.Allocate(q.rows, q.cols));
  PRECONDOR_ASSIGN_OR_RETURN(const double first, backend.Dot(r.view(), q));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, r.view(), Transpose::kNo, q, Transpose::kNo, 0.0, rq.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const double second, backend.Dot(r.view(), rq.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(1.0, r.view(), Transpose::kNo, rq.view(), Transpose::kNo, 0.0, rrq.view()));
  const double angle = second > 0 ? std::min(-first / second, kLargestRotation) : kLargestRotation;
  PRECONDOR_RETURN_IF_ERROR(backend.Axpby(angle, rq.view(), 1.0, q));
  return backend.Axpby(angle * angle / 2, rrq.view(), 1.0, q);
}

// Q <- Q - lr / L (T - t I) Q for T = U U' (or U' U) of the whitened gradient and t = elements / size.
absl::Status StepProcrustes(double lr, Backend& backend, From from, ConstMatrixView u, KronSide& q) {
  const double target = static_cast<double>(u.size()) / static_cast<double>(q.size);
  const auto bound = [&](double norm) {
    const double now = norm + target;
    return std::max(kSmoothnessDecay * q.smoothness + (1 - kSmoothnessDecay) * now, now);
  };
  if (q.is_diagonal()) {
    PRECONDOR_ASSIGN_OR_RETURN(const std::vector<double> t, SquaredNorms(backend, from, u));
    q.smoothness = bound(*std::max_element(t.begin(), t.end()));
    for (size_t i = 0; i < t.size(); ++i) q.diagonal[i] *= 1 - lr / q.smoothness * (t[i] - target);
    return absl::OkStatus();
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix t, backend.Allocate(q.size, q.size));
  PRECONDOR_RETURN_IF_ERROR(Gram(backend, from, u, t.view()));
  PRECONDOR_ASSIGN_OR_RETURN(const double norm, NormLowerBound(backend, t.view()));
  q.smoothness = bound(norm);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix before, backend.Allocate(q.size, q.size));
  PRECONDOR_RETURN_IF_ERROR(backend.Copy(q.matrix.view(), before.view()));
  PRECONDOR_RETURN_IF_ERROR(backend.Gemm(-lr / q.smoothness, t.view(), Transpose::kNo, before.view(), Transpose::kNo,
                                         1 + lr * target / q.smoothness, q.matrix.view()));
  return Rotate(backend, q.matrix.view());
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
  out.Number(side.smoothness);
  out.Numbers(side.diagonal);
  return out.Matrix(backend, side.matrix.view());
}

absl::Status LoadSide(Backend& backend, absl::string_view name, StateReader& in, KronSide& side) {
  PRECONDOR_ASSIGN_OR_RETURN(side.smoothness, in.Number(absl::StrCat(name, " smoothness")));
  PRECONDOR_ASSIGN_OR_RETURN(std::vector<double> diagonal, in.Numbers(absl::StrCat(name, " diagonal")));
  if (diagonal.size() != side.diagonal.size()) {
    return absl::FailedPreconditionError(absl::StrCat("layer state: ", name, " diagonal: expected ",
                                                      side.diagonal.size(), " numbers, got ", diagonal.size()));
  }
  side.diagonal = std::move(diagonal);
  return in.Matrix(name, backend, side.matrix.view());
}

}  // namespace

absl::StatusOr<KronBlock> KronBlock::Make(const KronConfig& config, int64_t rows, int64_t cols, bool diagonal_rows,
                                          bool diagonal_cols, Backend& backend) {
  const double scale = std::sqrt(config.init_scale);
  PRECONDOR_ASSIGN_OR_RETURN(KronSide left, MakeSide(rows, diagonal_rows, scale, backend));
  PRECONDOR_ASSIGN_OR_RETURN(KronSide right, MakeSide(cols, diagonal_cols, scale, backend));
  return KronBlock(std::move(left), std::move(right));
}

absl::StatusOr<KronBlock> KronBlock::Clone(Backend& backend) const {
  PRECONDOR_ASSIGN_OR_RETURN(KronSide left, CloneSide(rows_, backend));
  PRECONDOR_ASSIGN_OR_RETURN(KronSide right, CloneSide(cols_, backend));
  return KronBlock(std::move(left), std::move(right));
}

absl::Status KronBlock::Apply(const KronConfig& config, Backend& backend, MatrixView x) const {
  PRECONDOR_RETURN_IF_ERROR(Multiply(config, backend, From::kLeft, rows_, Transpose::kNo, x));
  PRECONDOR_RETURN_IF_ERROR(Multiply(config, backend, From::kLeft, rows_, Transpose::kYes, x));
  PRECONDOR_RETURN_IF_ERROR(Multiply(config, backend, From::kRight, cols_, Transpose::kYes, x));
  return Multiply(config, backend, From::kRight, cols_, Transpose::kNo, x);
}

absl::Status KronBlock::Balance(Backend& backend) {
  PRECONDOR_ASSIGN_OR_RETURN(const double left, Largest(backend, rows_));
  PRECONDOR_ASSIGN_OR_RETURN(const double right, Largest(backend, cols_));
  if (!(left > 0 && right > 0 && std::isfinite(left * right))) {
    return absl::FailedPreconditionError(
        absl::StrCat("balance: expected positive finite norms, got ", left, " and ", right));
  }
  const double mean = std::sqrt(left * right);
  PRECONDOR_RETURN_IF_ERROR(Scale(backend, mean / left, rows_));
  return Scale(backend, mean / right, cols_);
}

absl::Status KronBlock::Update(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v) {
  return config.variant == KronVariant::kTriangular ? UpdateTriangular(config, backend, g, v)
                                                    : UpdateProcrustes(config, backend, g);
}

// g becomes A = Q_L G Q_R', v becomes B = Q_L^-T V Q_R^-1.
absl::Status KronBlock::UpdateTriangular(const KronConfig& config, Backend& backend, MatrixView g, MatrixView v) {
  PRECONDOR_RETURN_IF_ERROR(Multiply(config, backend, From::kLeft, rows_, Transpose::kNo, g));
  PRECONDOR_RETURN_IF_ERROR(Multiply(config, backend, From::kRight, cols_, Transpose::kYes, g));
  PRECONDOR_RETURN_IF_ERROR(rows_.is_diagonal()
                                ? backend.ScaleRows(Reciprocals(rows_.diagonal), v, v)
                                : backend.TriangularSolve(From::kLeft, rows_.matrix.view(), Transpose::kYes, v));
  PRECONDOR_RETURN_IF_ERROR(cols_.is_diagonal()
                                ? backend.ScaleColumns(Reciprocals(cols_.diagonal), v, v)
                                : backend.TriangularSolve(From::kRight, cols_.matrix.view(), Transpose::kNo, v));
  PRECONDOR_RETURN_IF_ERROR(StepTriangular(config.precondition_lr, backend, From::kLeft, g, v, rows_));
  return StepTriangular(config.precondition_lr, backend, From::kRight, g, v, cols_);
}

// g becomes the whitened gradient.
absl::Status KronBlock::UpdateProcrustes(const KronConfig& config, Backend& backend, MatrixView g) {
  PRECONDOR_RETURN_IF_ERROR(Apply(config, backend, g));
  PRECONDOR_RETURN_IF_ERROR(StepProcrustes(config.precondition_lr, backend, From::kLeft, g, rows_));
  return StepProcrustes(config.precondition_lr, backend, From::kRight, g, cols_);
}

absl::Status KronBlock::Save(Backend& backend, StateWriter& out) const {
  PRECONDOR_RETURN_IF_ERROR(SaveSide(backend, rows_, out));
  return SaveSide(backend, cols_, out);
}

absl::Status KronBlock::Load(Backend& backend, StateReader& in) {
  PRECONDOR_RETURN_IF_ERROR(LoadSide(backend, "row factor", in, rows_));
  return LoadSide(backend, "column factor", in, cols_);
}

int64_t KronBlock::StateElements(int64_t rows, int64_t cols, bool diagonal_rows, bool diagonal_cols) {
  return (diagonal_rows ? 0 : rows * rows) + (diagonal_cols ? 0 : cols * cols);
}

int64_t KronBlock::ScratchElements(const KronConfig& config, int64_t rows, int64_t cols, bool diagonal_rows,
                                   bool diagonal_cols) {
  const int64_t d = std::max(diagonal_rows ? 0 : rows, diagonal_cols ? 0 : cols);
  if (config.variant == KronVariant::kTriangular) return 3 * d * d + 2 * d;
  return std::max(5 * d * d + 2 * d, d > 0 ? rows * cols : 0);
}

}  // namespace precondor
