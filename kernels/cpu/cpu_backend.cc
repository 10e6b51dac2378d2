// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <bit>
#include <cblas.h>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/bf16.h"
#include "kernels/cpu/block_cache.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/lapack.h"
#include "kernels/cpu/low_rank.h"
#include "kernels/cpu/vector_ops.h"
#ifdef PRECONDOR_HAVE_HIGHWAY
#include "kernels/cpu/symmetric_ops.h"
#endif

namespace precondor {
namespace {

void CopyRows(ConstMatrixView from, MatrixView to) {
  for (int64_t i = 0; i < from.rows; ++i) std::memmove(to.row(i), from.row(i), from.cols * sizeof(float));
}

// a_ij and a_ji become combine(a_ij, a_ji) for every j < i. Tile by tile through a small buffer: walking down columns
// of a itself misses the caches with every step, and thrashes them where the stride is a power of two.
template <typename Combine>
void CombineTriangles(MatrixView a, Combine combine) {
  constexpr int64_t kTile = 32;
  float mirror[kTile][kTile];
  for (int64_t row = 0; row < a.rows; row += kTile) {
    const int64_t row_end = std::min(row + kTile, a.rows);
    for (int64_t column = 0; column <= row; column += kTile) {
      const int64_t column_end = std::min(column + kTile, row_end);
      for (int64_t j = column; j < column_end; ++j) {
        for (int64_t i = std::max(row, j + 1); i < row_end; ++i) mirror[i - row][j - column] = a.at(j, i);
      }
      for (int64_t i = row; i < row_end; ++i) {
        float* below = a.row(i) + column;
        float* above = mirror[i - row];
        const int64_t count = std::min(column_end, i) - column;
        for (int64_t j = 0; j < count; ++j) below[j] = above[j] = combine(below[j], above[j]);
      }
      for (int64_t j = column; j < column_end; ++j) {
        for (int64_t i = std::max(row, j + 1); i < row_end; ++i) a.at(j, i) = mirror[i - row][j - column];
      }
    }
  }
}

// The lower triangle of a in f64, which is LAPACK's upper one; the rest is zero. False when an element is not finite.
bool LoadLowerTriangle(ConstMatrixView a, double* out) {
  const int64_t n = a.rows;
  std::fill_n(out, n * n, 0.0);
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      out[i * n + j] = a.at(i, j);
      finite = finite && std::isfinite(a.at(i, j));
    }
  }
  return finite;
}

// False when an element is not finite.
bool Load(ConstMatrixView a, double* out) {
  bool finite = true;
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < a.cols; ++j) {
      out[i * a.cols + j] = a.at(i, j);
      finite = finite && std::isfinite(a.at(i, j));
    }
  }
  return finite;
}

// Work memory of one operation, unset, from the backend's cache. Sizes are rounded up in steps of an eighth, so that
// operations of many sizes find what others have left.
class Work {
 public:
  static absl::StatusOr<Work> Floats(BlockCache& memory, int64_t count) {
    const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count))) / 8);
    const int64_t elements = (count + step - 1) / step * step;
    PRECONDOR_ASSIGN_OR_RETURN(float* const block, memory.AllocateUnset(elements));
    return Work(memory, block, elements);
  }
  static absl::StatusOr<Work> Doubles(BlockCache& memory, int64_t count) { return Floats(memory, 2 * count); }
  Work(Work&& other) noexcept
      : memory_(other.memory_), block_(std::exchange(other.block_, nullptr)), elements_(other.elements_) {}
  Work& operator=(Work&&) = delete;
  ~Work() {
    if (block_ != nullptr) memory_.Free(block_, elements_);
  }
  float* floats() { return block_; }
  double* doubles() { return reinterpret_cast<double*>(block_); }
  int* ints() { return reinterpret_cast<int*>(block_); }

 private:
  Work(BlockCache& memory, float* block, int64_t elements) : memory_(memory), block_(block), elements_(elements) {}

  BlockCache& memory_;
  float* block_;
  const int64_t elements_;
};

CBLAS_SIDE Blas(From side) { return side == From::kRight ? CblasRight : CblasLeft; }
CBLAS_TRANSPOSE Blas(Transpose transpose) { return transpose == Transpose::kYes ? CblasTrans : CblasNoTrans; }

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuBackendOptions& options)
      : memory_(options.memory_limit_bytes, options.cache_limit_bytes) {}

  absl::string_view name() const override { return "cpu"; }

 private:
  absl::StatusOr<float*> DoAllocate(int64_t elements) override { return memory_.Allocate(elements); }
  void DoFree(float* data, int64_t elements) override { memory_.Free(data, elements); }
  int64_t DoAllocatedBytes() const override { return memory_.live_bytes(); }
  void DoTrim() override { memory_.Trim(); }

  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override { return DoCopy(host, device); }
  absl::Status DoDownload(ConstMatrixView device, MatrixView host) override { return DoCopy(device, host); }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override {
    CopyRows(from, to);
    return absl::OkStatus();
  }

  absl::Status DoGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                      double beta, MatrixView c) override {
    cpu::Gemm(alpha, a, transpose_a, b, transpose_b, beta, c);
    return absl::OkStatus();
  }

  absl::Status DoAxpby(double alpha, ConstMatrixView x, double beta, MatrixView y) override {
    const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
    for (int64_t i = 0; i < y.rows; ++i) {
      const float* in = x.row(i);
      float* out = y.row(i);
      if (alpha == 0.0 && beta == 0.0) {
        std::fill(out, out + y.cols, 0.0f);
      } else if (beta == 0.0) {
        cpu::Scale(fa, in, y.cols, out);
      } else if (alpha == 0.0) {
        for (int64_t j = 0; j < y.cols; ++j) out[j] *= fb;
      } else {
        for (int64_t j = 0; j < y.cols; ++j) out[j] = fa * in[j] + fb * out[j];
      }
    }
    return absl::OkStatus();
  }

  absl::Status DoScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    for (int64_t i = 0; i < y.rows; ++i) cpu::Scale(static_cast<float>(scales[i]), x.row(i), y.cols, y.row(i));
    return absl::OkStatus();
  }

  absl::Status DoScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    PRECONDOR_ASSIGN_OR_RETURN(Work memory, Work::Floats(memory_, y.cols));
    float* const factors = memory.floats();
    for (int64_t j = 0; j < y.cols; ++j) factors[j] = static_cast<float>(scales[j]);
    for (int64_t i = 0; i < y.rows; ++i) {
      const float* in = x.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = factors[j] * in[j];
    }
    return absl::OkStatus();
  }

  absl::Status DoMultiplyElements(double alpha, ConstMatrixView x, ConstMatrixView y, double beta,
                                  MatrixView z) override {
    const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
    for (int64_t i = 0; i < z.rows; ++i) {
      const float *left = x.row(i), *right = y.row(i);
      float* out = z.row(i);
      if (beta == 0.0) {
        for (int64_t j = 0; j < z.cols; ++j) out[j] = fa * left[j] * right[j];
      } else {
        for (int64_t j = 0; j < z.cols; ++j) out[j] = fa * left[j] * right[j] + fb * out[j];
      }
    }
    return absl::OkStatus();
  }

  absl::Status DoDivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon,
                              MatrixView y) override {
    const float fa = static_cast<float>(alpha), fe = static_cast<float>(epsilon);
    for (int64_t i = 0; i < y.rows; ++i) {
      const float *in = x.row(i), *squares = v.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = fa * in[j] / (std::sqrt(squares[j]) + fe);
    }
    return absl::OkStatus();
  }

  absl::Status DoDivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                               double shift, ConstMatrixView x, MatrixView y) override {
    for (int64_t i = 0; i < y.rows; ++i) {
      const double row = rows[i];
      const float* in = x.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = static_cast<float>(alpha / (row * columns[j] + shift)) * in[j];
    }
    return absl::OkStatus();
  }

  absl::Status DoGather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                        MatrixView y) override {
    for (int64_t i = 0; i < y.rows; ++i) {
      const float* in = x.row(rows.empty() ? i : rows[i]);
      float* out = y.row(i);
      if (columns.empty()) {
        std::copy_n(in, y.cols, out);
      } else {
        for (int64_t j = 0; j < y.cols; ++j) out[j] = in[columns[j]];
      }
    }
    return absl::OkStatus();
  }

  absl::Status DoScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) override {
    for (int64_t i = 0; i < y.rows; ++i) {
      const double scale = scales[i];
      const float* in = x.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = static_cast<float>(scale * scales[j] * in[j]);
    }
    return absl::OkStatus();
  }

  absl::Status DoAddDiagonal(double value, MatrixView a) override {
    for (int64_t i = 0; i < a.rows; ++i) a.at(i, i) = static_cast<float>(a.at(i, i) + value);
    return absl::OkStatus();
  }

  absl::StatusOr<double> DoDot(ConstMatrixView x, ConstMatrixView y) override {
    double sum = 0;
    for (int64_t i = 0; i < x.rows; ++i) sum += cpu::Dot(x.row(i), y.row(i), x.cols);
    return sum;
  }

  absl::Status DoRowSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    for (int64_t i = 0; i < x.rows; ++i) out[i] = cpu::Dot(x.row(i), x.row(i), x.cols);
    return absl::OkStatus();
  }

  absl::Status DoColumnSquaredNorms(ConstMatrixView x, absl::Span<double> out) override {
    std::fill(out.begin(), out.end(), 0.0);
    for (int64_t i = 0; i < x.rows; ++i) {
      const float* in = x.row(i);
      for (int64_t j = 0; j < x.cols; ++j) out[j] += static_cast<double>(in[j]) * in[j];
    }
    return absl::OkStatus();
  }

  absl::StatusOr<double> DoAbsoluteSum(ConstMatrixView x) override {
    double sums[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < x.rows; ++i) {
      const float* in = x.row(i);
      int64_t j = 0;
      for (; j + 4 <= x.cols; j += 4) {
        for (int k = 0; k < 4; ++k) sums[k] += std::fabs(in[j + k]);
      }
      for (; j < x.cols; ++j) sums[0] += std::fabs(in[j]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  absl::StatusOr<double> DoAbsoluteMaximum(ConstMatrixView x) override {
    float largest = 0;
    bool nan = false;
    for (int64_t i = 0; i < x.rows; ++i) {
      const float* in = x.row(i);
      for (int64_t j = 0; j < x.cols; ++j) {
        largest = std::max(largest, std::fabs(in[j]));
        nan |= std::isnan(in[j]);
      }
    }
    return nan ? std::numeric_limits<double>::quiet_NaN() : largest;
  }

  absl::Status DoDiagonal(ConstMatrixView a, absl::Span<double> out) override {
    for (int64_t i = 0; i < a.rows; ++i) out[i] = a.at(i, i);
    return absl::OkStatus();
  }

  absl::Status DoSymmetrize(MatrixView a) override {
    CombineTriangles(a, [](float below, float above) { return 0.5f * below + 0.5f * above; });
    return absl::OkStatus();
  }

  absl::Status DoPackLower(ConstMatrixView x, MatrixView packed) override {
    float* out = packed.data;
    for (int64_t i = 0; i < x.rows; ++i) out = std::copy_n(x.row(i), i + 1, out);
    return absl::OkStatus();
  }

  absl::Status DoUnpackLower(ConstMatrixView packed, MatrixView x) override {
    const float* in = packed.data;
    for (int64_t i = 0; i < x.rows; in += ++i) std::copy_n(in, i + 1, x.row(i));
    CombineTriangles(x, [](float below, float) { return below; });
    return absl::OkStatus();
  }

  absl::Status DoPackRow(ConstMatrixView x, int64_t i, MatrixView packed) override {
    std::copy_n(x.data, i + 1, packed.data + i * (i + 1) / 2);
    for (int64_t j = i + 1; j < x.cols; ++j) packed.data[j * (j + 1) / 2 + i] = x.data[j];
    return absl::OkStatus();
  }

  absl::Status DoSpdInverse(ConstMatrixView a, MatrixView x) override {
    const int n = static_cast<int>(a.rows);
    PRECONDOR_ASSIGN_OR_RETURN(Work memory, Work::Doubles(memory_, a.size()));
    double* const work = memory.doubles();
    if (!LoadLowerTriangle(a, work)) return absl::FailedPreconditionError("SpdInverse: a: expected finite elements");
    int info = 0;
    dpotrf_("U", &n, work, &n, &info);
    if (info == 0) dpotri_("U", &n, work, &n, &info);
    if (info != 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("SpdInverse: a: expected positive definite, but leading minor ", info, " of ", n, " is not"));
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) x.at(i, j) = static_cast<float>(work[i * n + j]);
    }
    CombineTriangles(x, [](float below, float) { return below; });
    return absl::OkStatus();
  }

  absl::Status DoSymmetricEigen(ConstMatrixView a, absl::Span<double> values, MatrixView q) override {
    const int n = static_cast<int>(a.rows);
    PRECONDOR_ASSIGN_OR_RETURN(Work memory, Work::Doubles(memory_, a.size() + n));
    double *const vectors = memory.doubles(), *const eigenvalues = vectors + a.size();
    if (!LoadLowerTriangle(a, vectors))
      return absl::FailedPreconditionError("SymmetricEigen: a: expected finite elements");
    double work_size = 0;
    int iwork_size = 0, query = -1, info = 0;
    dsyevd_("V", "U", &n, vectors, &n, eigenvalues, &work_size, &query, &iwork_size, &query, &info);
    const int lwork = static_cast<int>(work_size), liwork = iwork_size;
    PRECONDOR_ASSIGN_OR_RETURN(Work work, Work::Doubles(memory_, lwork));
    PRECONDOR_ASSIGN_OR_RETURN(Work iwork, Work::Floats(memory_, liwork));
    if (info == 0) {
      dsyevd_("V", "U", &n, vectors, &n, eigenvalues, work.doubles(), &lwork, iwork.ints(), &liwork, &info);
    }
    if (info != 0) {
      return absl::FailedPreconditionError(absl::StrCat("SymmetricEigen: no convergence, LAPACK says ", info));
    }
    // A column-major matrix of column vectors is a row-major one of row vectors.
    for (int64_t i = 0; i < n; ++i) {
      values[i] = eigenvalues[i];
      for (int64_t j = 0; j < n; ++j) q.at(i, j) = static_cast<float>(vectors[i * n + j]);
    }
    return absl::OkStatus();
  }

  absl::Status DoTriangularMultiply(From side, ConstMatrixView a, Transpose transpose, MatrixView x) override {
    cblas_strmm(CblasRowMajor, Blas(side), CblasUpper, Blas(transpose), CblasNonUnit, x.rows, x.cols, 1.0f, a.data,
                a.stride, x.data, x.stride);
    return absl::OkStatus();
  }

  absl::Status DoTriangularSolve(From side, ConstMatrixView a, Transpose transpose, MatrixView x) override {
    cblas_strsm(CblasRowMajor, Blas(side), CblasUpper, Blas(transpose), CblasNonUnit, x.rows, x.cols, 1.0f, a.data,
                a.stride, x.data, x.stride);
    return absl::OkStatus();
  }

  // The rows of a row-major matrix are the columns of a column-major one.
  absl::Status DoOrthonormalizeRows(ConstMatrixView a, MatrixView q) override {
    const int d = static_cast<int>(a.cols), n = static_cast<int>(a.rows);
    PRECONDOR_ASSIGN_OR_RETURN(Work memory, Work::Doubles(memory_, a.size() + 2 * a.rows));
    double *const vectors = memory.doubles(), *const tau = vectors + a.size(), *const signs = tau + n;
    if (!Load(a, vectors)) return absl::FailedPreconditionError("OrthonormalizeRows: a: expected finite elements");
    double work_size = 0;
    int query = -1, info = 0;
    dgeqrf_(&d, &n, vectors, &d, tau, &work_size, &query, &info);
    const int lwork = std::max(static_cast<int>(work_size), n);
    PRECONDOR_ASSIGN_OR_RETURN(Work work, Work::Doubles(memory_, lwork));
    if (info == 0) dgeqrf_(&d, &n, vectors, &d, tau, work.doubles(), &lwork, &info);
    for (int64_t i = 0; i < n; ++i) signs[i] = vectors[i * d + i] < 0 ? -1.0 : 1.0;
    if (info == 0) dorgqr_(&d, &n, &n, vectors, &d, tau, work.doubles(), &lwork, &info);
    if (info != 0) return absl::InternalError(absl::StrCat("OrthonormalizeRows: LAPACK says ", info));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < d; ++j) q.at(i, j) = static_cast<float>(signs[i] * vectors[i * d + j]);
    }
    return absl::OkStatus();
  }

  absl::Status DoLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                                     ProductPrecision, absl::Span<double> squares, MatrixView u) override {
    PRECONDOR_RETURN_IF_ERROR(LowRank(out_side, in_side, d, nullptr, u));
    if (squares.empty()) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(squares[0], DoDot(d, d));
    PRECONDOR_ASSIGN_OR_RETURN(squares[1], DoDot(u, u));
    return absl::OkStatus();
  }
  absl::Status DoScaledLowRankPrecondition(const LowRankInverse& out_side, const LowRankInverse& in_side,
                                           ConstMatrixView d, ProductPrecision, LengthRule rule,
                                           MatrixView u) override {
    return LowRank(out_side, in_side, d, &rule, u);
  }
  absl::Status LowRank(const LowRankInverse& out_side, const LowRankInverse& in_side, ConstMatrixView d,
                       const LengthRule* rule, MatrixView u) {
    const int64_t elements = cpu::LowRankScratch(d.rows, d.cols, out_side.vectors.rows, in_side.vectors.rows);
    if (elements == 0) return cpu::LowRankPrecondition(out_side, in_side, d, rule, nullptr, u);
    PRECONDOR_ASSIGN_OR_RETURN(Work scratch, Work::Floats(memory_, elements));
    return cpu::LowRankPrecondition(out_side, in_side, d, rule, scratch.floats(), u);
  }

  bool DoKnowsProducts(ProductPrecision precision) const override {
    return precision != ProductPrecision::kBf16 || cpu::KnowsBf16();
  }
  absl::Status DoDensePrecondition(const SymmetricForm& l, const SymmetricForm& r, ConstMatrixView d,
                                   ProductPrecision precision, absl::Span<double> squares, MatrixView u) override {
    DeviceMatrix made_l, made_r;
    PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView left, Expanded(*this, l, made_l));
    PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView right, Expanded(*this, r, made_r));
    PRECONDOR_RETURN_IF_ERROR(DenseProduct(left, right, d, precision, u));
    if (squares.empty()) return absl::OkStatus();
    PRECONDOR_ASSIGN_OR_RETURN(squares[0], DoDot(d, d));
    PRECONDOR_ASSIGN_OR_RETURN(squares[1], DoDot(u, u));
    return absl::OkStatus();
  }
  absl::Status DenseProduct(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, ProductPrecision precision,
                            MatrixView u) {
    const bool bf16 = precision == ProductPrecision::kBf16;
    const int64_t elements = bf16 ? cpu::Bf16Scratch(d.rows, d.cols) : d.size();
    PRECONDOR_ASSIGN_OR_RETURN(Work scratch, Work::Floats(memory_, elements));
    if (bf16) {
      return cpu::Bf16Precondition(l, r, d, scratch.floats(), u)
                 ? absl::OkStatus()
                 : absl::InternalError("DensePrecondition: oneDNN made no bf16 product");
    }
    const MatrixView half(scratch.floats(), d.rows, d.cols);
    cpu::Gemm(1.0, l, Transpose::kNo, d, Transpose::kNo, 0.0, half);
    cpu::Gemm(1.0, half, Transpose::kNo, r, Transpose::kNo, 0.0, u);
    return absl::OkStatus();
  }

#ifdef PRECONDOR_HAVE_HIGHWAY
  bool DoKnowsSymmetric(SymmetricStorage) const override { return true; }
  absl::Status DoSymmetricUpdateMultiply(double scale, double shift, absl::Span<const double> weights,
                                         ConstMatrixView rows, SymmetricMatrix& m, ConstMatrixView v,
                                         MatrixView y) override {
    return tiles::SymmetricUpdateMultiply(*this, scale, shift, weights, rows, m, v, y);
  }
  absl::Status DoSymmetricExpand(double scale, double shift, absl::Span<const double> weights, ConstMatrixView rows,
                                 const SymmetricMatrix& m, MatrixView x) override {
    return tiles::SymmetricExpand(*this, scale, shift, weights, rows, m, x);
  }
  absl::Status DoSymmetricCompress(ConstMatrixView x, SymmetricMatrix& m) override {
    tiles::SymmetricCompress(x, m);
    return absl::OkStatus();
  }
#endif

  BlockCache memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeCpuBackend(const CpuBackendOptions& options) {
  if (options.memory_limit_bytes <= 0 || options.cache_limit_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("cpu backend: expected positive memory_limit_bytes, got ",
                                                   options.memory_limit_bytes, ", and cache_limit_bytes >= 0, got ",
                                                   options.cache_limit_bytes));
  }
  openblas_set_num_threads(1);
  return std::unique_ptr<Backend>(std::make_unique<CpuBackend>(options));
}

}  // namespace precondor
