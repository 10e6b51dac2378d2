// SPDX-License-Identifier: Apache-2.0
// With X = P D, Y = D Q', K = P Y and F = S K T,
//   U = J_out D J_in / (c_out c_in) = (I - P'SP) D (I - Q'TQ) = D - P' S X - Y T Q + P' F Q.
// This is D minus a product of inner size p + q, [P', Y T] [S X; Q], with P' F subtracted from Y T, or F Q from S X,
// whichever is smaller. (I - P'SP)^2 = I - P' (2 S - S P P' S) P. If S = s (I + s P P' s)^-1 s for a diagonal s, then
// S P P' S = S - S s^-2 S. So, with N = K T and angle brackets for sums of products of elements,
//   |U|^2 = |D|^2 - <X, S X> - |s^-1 S X|^2 - <Y, Y T> - |Y T t^-1|^2
//           + <K, F> + <N t^-2, F> + <s^-2 S K, F> + |s^-1 F t^-1|^2,
// all from matrices that are small or already computed.
#include "kernels/cpu/composites.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/status/statusor.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/symmetric_tiles.h"
#include "kernels/cpu/vector_ops.h"

namespace precondor::cpu {
namespace {

// The formula for |U|^2 subtracts. Below this share of |D|^2, f32's rounding of the terms, 1e-6 of |D|^2, becomes
// significant.
constexpr double kSmallestShare = 1e-2;

MatrixView Columns(MatrixView x, int64_t begin, int64_t count) {
  return MatrixView(x.data + begin, x.rows, count, x.stride);
}

double DotAll(ConstMatrixView x, ConstMatrixView y) {
  double sum = 0;
  for (int64_t i = 0; i < x.rows; ++i) sum += Dot(x.row(i), y.row(i), x.cols);
  return sum;
}

void ScaleAll(double scale, ConstMatrixView x, MatrixView y) {
  for (int64_t i = 0; i < x.rows; ++i) Scale(static_cast<float>(scale), x.row(i), x.cols, y.row(i));
}

// y = x', block by block: a column of x maps to few cache sets if the stride is a power of two.
void TransposeInto(ConstMatrixView x, MatrixView y) {
  constexpr int64_t kBlock = 16;
  for (int64_t row = 0; row < x.rows; row += kBlock) {
    const int64_t row_end = std::min(row + kBlock, x.rows);
    for (int64_t column = 0; column < x.cols; column += kBlock) {
      const int64_t column_end = std::min(column + kBlock, x.cols);
      for (int64_t j = column; j < column_end; ++j) {
        float* out = y.row(j);
        for (int64_t i = row; i < row_end; ++i) out[i] = x.at(i, j);
      }
    }
  }
}

// Returns 1 / root^2, or 0 for a root of 0, whose row of S is zero.
double InverseSquare(double root) { return root > 0 ? 1 / (root * root) : 0.0; }

class Precondition {
 public:
  Precondition(const LowRankInverse& out, const LowRankInverse& in, ConstMatrixView d, float* scratch)
      : out_(out), in_(in), d_(d), scratch_(scratch) {
    left_ = Take(m(), p() + q());
    right_ = Take(p() + q(), n());
    x_ = Take(p(), n());
    y_ = Take(m(), q());
    in_transposed_ = Take(n(), q());
    k_ = Take(p(), q());
    sk_ = Take(p(), q());
    f_ = Take(p(), q());
    kt_ = Take(p(), q());
  }

  void SmallProducts() {
    if (p() > 0) {
      Gemm(1, out_.vectors, Transpose::kNo, d_, Transpose::kNo, 0, x_);
      Gemm(1, out_.core, Transpose::kNo, x_, Transpose::kNo, 0, sx());
      TransposeInto(out_.vectors, Columns(left_, 0, p()));
    }
    if (q() > 0) {
      TransposeInto(in_.vectors, in_transposed_);
      Gemm(1, d_, Transpose::kNo, in_transposed_, Transpose::kNo, 0, y_);
      Gemm(1, y_, Transpose::kNo, in_.core, Transpose::kNo, 0, yt());
      for (int64_t i = 0; i < q(); ++i) std::copy_n(in_.vectors.row(i), n(), right_.row(p() + i));
    }
    if (p() == 0 || q() == 0) return;
    if (m() <= n()) {
      Gemm(1, out_.vectors, Transpose::kNo, y_, Transpose::kNo, 0, k_);
    } else {
      Gemm(1, x_, Transpose::kNo, in_transposed_, Transpose::kNo, 0, k_);
    }
    Gemm(1, out_.core, Transpose::kNo, k_, Transpose::kNo, 0, sk_);
    Gemm(1, sk_, Transpose::kNo, in_.core, Transpose::kNo, 0, f_);
  }

  bool KnowsLength() const {
    return static_cast<int64_t>(out_.roots.size()) == p() && static_cast<int64_t>(in_.roots.size()) == q();
  }

  // Returns |U|^2. Call it before Product, which changes one of its terms.
  double SquaredLength(double d_square) {
    double square = d_square - DotAll(x_, sx()) - DotAll(y_, yt());
    for (int64_t i = 0; i < p(); ++i) {
      square -= InverseSquare(out_.roots[i]) * Dot(sx().row(i), sx().row(i), n());
    }
    float* weights = k_.data;  // not needed after Crossed; empty unless both sides have vectors
    if (p() == 0 || q() == 0) {
      weights = in_transposed_.data;
    } else {
      square += Crossed();
    }
    for (int64_t j = 0; j < q(); ++j) weights[j] = static_cast<float>(InverseSquare(in_.roots[j]));
    for (int64_t i = 0; i < m() && q() > 0; ++i) square -= WeightedSquare(weights, yt().row(i), q());
    return square;
  }

  // u = scale U.
  void Product(double scale, MatrixView u) {
    if (p() > 0 && q() > 0) {
      if (m() <= n()) {
        Gemm(-1, Columns(left_, 0, p()), Transpose::kNo, f_, Transpose::kNo, 1, yt());
      } else {
        Gemm(-1, f_, Transpose::kNo, in_.vectors, Transpose::kNo, 1, sx());
      }
    }
    ScaleAll(scale, d_, u);
    if (p() + q() > 0) Gemm(-scale, left_, Transpose::kNo, right_, Transpose::kNo, 1, u);
  }

 private:
  int64_t m() const { return d_.rows; }
  int64_t n() const { return d_.cols; }
  int64_t p() const { return out_.vectors.rows; }
  int64_t q() const { return in_.vectors.rows; }
  MatrixView sx() const { return right_.RowRange(0, p()); }
  MatrixView yt() const { return Columns(left_, p(), q()); }

  MatrixView Take(int64_t rows, int64_t cols) {
    float* data = scratch_;
    scratch_ += rows * cols;
    return MatrixView(data, rows, cols);
  }

  // Returns the terms that involve both sides: the last four.
  double Crossed() const {
    Gemm(1, k_, Transpose::kNo, in_.core, Transpose::kNo, 0, kt_);
    double sum = DotAll(k_, f_);
    for (int64_t i = 0; i < p(); ++i) {
      const double row = InverseSquare(out_.roots[i]);
      const float *f = f_.row(i), *sk = sk_.row(i), *kt = kt_.row(i);
      for (int64_t j = 0; j < q(); ++j) {
        const double column = InverseSquare(in_.roots[j]);
        sum += f[j] * (column * kt[j] + row * (sk[j] + column * f[j]));
      }
    }
    return sum;
  }

  const LowRankInverse& out_;
  const LowRankInverse& in_;
  const ConstMatrixView d_;
  float* scratch_;
  MatrixView left_, right_, x_, y_, in_transposed_, k_, sk_, f_, kt_;
};

// Whether scale is a normal f32 number, with room for the products that it scales.
bool IsPlain(double scale) { return scale > 1e-30 && scale < 1e30; }

// Makes both panels of the terms, the left ones first. Each row is scaled by the root of its weight, so that left and
// right differ only by a sign and the tiles on the diagonal stay symmetric to the bit.
absl::StatusOr<DeviceMatrix> MakePanels(Backend& backend, absl::Span<const double> weights, ConstMatrixView rows) {
  const int64_t count = rows.rows, tiles = TileRows(rows.cols);
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix panels, backend.Allocate(2 * tiles * count, kTileSide));
  for (int64_t i = 0; i < count; ++i) {
    const float root = static_cast<float>(std::sqrt(std::fabs(weights[i])));
    const float sign = weights[i] < 0 ? -1.0f : 1.0f;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      float* left = panels.view().row(tile * count + i);
      float* right = panels.view().row((tiles + tile) * count + i);
      const float* from = rows.row(i) + tile * kTileSide;
      for (int64_t j = 0; j < TileHeight(rows.cols, tile); ++j) {
        right[j] = root * from[j];
        left[j] = sign * right[j];
      }
    }
  }
  return panels;
}

tiles::Terms TermsOf(const DeviceMatrix& panels, int64_t count) {
  if (count == 0) return {};
  return {panels.view().data, panels.view().row(panels.rows() / 2), count};
}

// Whether `data` has the alignment that the kernels' loads need.
bool IsAligned(const float* data) { return reinterpret_cast<uintptr_t>(data) % 64 == 0; }

}  // namespace

int64_t LowRankScratch(int64_t m, int64_t n, int64_t p, int64_t q) {
  return (p + q) * (m + n) + p * n + q * (m + n) + 4 * p * q;
}

absl::Status LowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                 const LengthRule* rule, float* scratch, MatrixView u) {
  Precondition precondition(out_side, in_side, d, scratch);
  precondition.SmallProducts();
  const double scale = out_side.c * in_side.c;
  if (rule == nullptr) {
    precondition.Product(scale, u);
    return absl::OkStatus();
  }
  const double d_square = DotAll(d, d);
  if (precondition.KnowsLength()) {
    const double square = precondition.SquaredLength(d_square);
    if (square > kSmallestShare * d_square && std::isfinite(d_square)) {
      PRECONDOR_ASSIGN_OR_RETURN(const double factor, (*rule)(std::sqrt(d_square), scale * std::sqrt(square)));
      if (IsPlain(factor * scale)) {
        precondition.Product(factor * scale, u);
        return absl::OkStatus();
      }
    }
  }
  precondition.Product(scale, u);
  PRECONDOR_ASSIGN_OR_RETURN(double factor, (*rule)(std::sqrt(d_square), std::sqrt(DotAll(u, u))));
  constexpr double kLargestFactor = 1e30;
  while (factor > kLargestFactor) {
    ScaleAll(kLargestFactor, u, u);
    factor /= kLargestFactor;
  }
  if (factor != 1.0) ScaleAll(factor, u, u);
  return absl::OkStatus();
}

absl::Status Run(Backend& backend, const operation::SymmetricUpdateMultiply& update) {
  const ConstMatrixView rows = update.rows, v = update.v;
  const MatrixView y = update.y;
  const int64_t n = update.n, length = tiles::PaddedLength(n), count = v.rows;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix panels, MakePanels(backend, update.weights, rows));
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix scratch, backend.Allocate(1, tiles::MultiplyScratch(n, count)));
  const tiles::Terms terms = TermsOf(panels, rows.rows);
  const auto run = [&](const float* in, float* out) {
    tiles::UpdateMultiply(static_cast<float>(update.scale), update.shift, terms, {update.raw.data, n, update.storage},
                          in, count, out, scratch.view().data);
  };
  if (count <= 1 && n == length && IsAligned(v.data) && IsAligned(y.data)) {
    run(v.data, y.data);
    return absl::OkStatus();
  }
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix padded, backend.Allocate(2 * count, length));
  const MatrixView in = padded.view().RowRange(0, count), out = padded.view().RowRange(count, count);
  for (int64_t k = 0; k < count; ++k) std::copy_n(v.row(k), n, in.row(k));
  run(in.data, out.data);
  for (int64_t k = 0; k < count; ++k) std::copy_n(out.row(k), n, y.row(k));
  return absl::OkStatus();
}

absl::Status Run(Backend& backend, const operation::SymmetricExpand& expand) {
  const SymmetricForm& form = expand.form;
  PRECONDOR_ASSIGN_OR_RETURN(DeviceMatrix panels, MakePanels(backend, form.weights, form.rows));
  tiles::Expand(static_cast<float>(form.scale), form.shift, TermsOf(panels, form.rows.rows), form.raw.data, form.n,
                form.storage, expand.x);
  return absl::OkStatus();
}

}  // namespace precondor::cpu
