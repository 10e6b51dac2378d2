// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <bit>
#include <cblas.h>
#include <cmath>
#include <cstring>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/block_cache.h"
#include "kernels/cpu/composites.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/lapack.h"
#include "kernels/cpu/vector_ops.h"

namespace precondor {
namespace {

void CopyRows(ConstMatrixView from, MatrixView to) {
  for (int64_t i = 0; i < from.rows; ++i) std::memmove(to.row(i), from.row(i), from.cols * sizeof(float));
}

// Sets a_ij and a_ji to combine(a_ij, a_ji) for every j < i. It works tile by tile through a small buffer: reading
// columns of a directly misses the caches at every step, and thrashes them if the stride is a power of two.
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

// Loads the lower triangle of a in f64, which is LAPACK's upper one, and sets the rest to zero. Returns false if an
// element is not finite.
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

// Loads a in f64. Returns false if an element is not finite.
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

// Uninitialised work memory of one operation from the backend's cache. Sizes are rounded up in steps of an eighth, so
// that operations of different sizes can reuse each other's blocks.
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
  absl::StatusOr<float*> DoAllocateScratch(int64_t elements) override { return memory_.AllocateUnset(elements); }
  void DoFree(float* data, int64_t elements) override { memory_.Free(data, elements); }
  int64_t DoAllocatedBytes() const override { return memory_.live_bytes(); }
  void DoTrim() override { memory_.Trim(); }

  absl::Status DoUpload(ConstMatrixView host, MatrixView device) override { return DoCopy(host, device); }
  absl::Status DoDownload(ConstMatrixView device, MatrixView host) override { return DoCopy(device, host); }
  absl::Status DoCopy(ConstMatrixView from, MatrixView to) override {
    CopyRows(from, to);
    return absl::OkStatus();
  }

  void DoRun(absl::Span<const Operation* const> operations, absl::Span<absl::Status> statuses) override {
    for (size_t i = 0; i < operations.size(); ++i) {
      statuses[i] = std::visit([this](const auto& kind) { return this->RunOne(kind); }, operations[i]->what);
    }
  }

  // --- Element-wise operations --------------------------------------------------------------------------------------

  absl::Status RunOne(const operation::Elementwise& e) {
    switch (e.kind) {
      case ElementwiseKind::kAxpby:
        return Combine(e.alpha, e.x, e.beta, e.v, e.y);
      case ElementwiseKind::kScaleRows:
        return ScaleRows(e.scales, e.x, e.y);
      case ElementwiseKind::kScaleColumns:
        return ScaleColumns(e.scales, e.x, e.y);
      case ElementwiseKind::kScaleBothSides:
        return ScaleBothSides(e.scales, e.x, e.y);
      case ElementwiseKind::kAddDiagonal:
        return AddDiagonal(e.alpha, e.y);
      case ElementwiseKind::kPackLower:
        return PackLower(e.x, e.y);
      case ElementwiseKind::kUnpackLower:
        return UnpackLower(e.x, e.y);
      case ElementwiseKind::kPackRow:
        return PackRow(e.x, e.row, e.y);
      case ElementwiseKind::kSymmetrize:
        CombineTriangles(e.y, [](float below, float above) { return 0.5f * below + 0.5f * above; });
        return absl::OkStatus();
      case ElementwiseKind::kMultiply:
        return Multiply(e.alpha, e.x, e.v, e.beta, e.y);
      case ElementwiseKind::kDivideByRoot:
        return DivideByRoot(e.alpha, e.x, e.v, e.beta, e.y);
      case ElementwiseKind::kDivideByOuter:
        return DivideByOuter(e.alpha, e.scales, e.column_scales, e.beta, e.x, e.y);
      case ElementwiseKind::kGather:
        return Gather(e.rows, e.columns, e.x, e.y);
    }
    return absl::InternalError("cpu backend: unknown kind of operation");
  }

  static absl::Status Combine(double alpha, ConstMatrixView x, double beta, ConstMatrixView v, MatrixView y) {
    const float fa = static_cast<float>(alpha), fb = static_cast<float>(beta);
    for (int64_t i = 0; i < y.rows; ++i) {
      const float* in = x.row(i);
      float* out = y.row(i);
      if (alpha == 0.0 && beta == 0.0) {
        std::fill(out, out + y.cols, 0.0f);
      } else if (beta == 0.0) {
        cpu::Scale(fa, in, y.cols, out);
      } else if (alpha == 0.0) {
        cpu::Scale(fb, v.row(i), y.cols, out);
      } else if (v.data == y.data) {  // a loop of its own, because compilers do not vectorize the other one for this
        for (int64_t j = 0; j < y.cols; ++j) out[j] = fa * in[j] + fb * out[j];
      } else {
        const float* other = v.row(i);
        for (int64_t j = 0; j < y.cols; ++j) out[j] = fa * in[j] + fb * other[j];
      }
    }
    return absl::OkStatus();
  }

  static absl::Status ScaleRows(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
    for (int64_t i = 0; i < y.rows; ++i) cpu::Scale(static_cast<float>(scales[i]), x.row(i), y.cols, y.row(i));
    return absl::OkStatus();
  }

  absl::Status ScaleColumns(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
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

  static absl::Status Multiply(double alpha, ConstMatrixView x, ConstMatrixView y, double beta, MatrixView z) {
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

  static absl::Status DivideByRoot(double alpha, ConstMatrixView x, ConstMatrixView v, double epsilon, MatrixView y) {
    const float fa = static_cast<float>(alpha), fe = static_cast<float>(epsilon);
    for (int64_t i = 0; i < y.rows; ++i) {
      const float *in = x.row(i), *squares = v.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = fa * in[j] / (std::sqrt(squares[j]) + fe);
    }
    return absl::OkStatus();
  }

  static absl::Status DivideByOuter(double alpha, absl::Span<const double> rows, absl::Span<const double> columns,
                                    double shift, ConstMatrixView x, MatrixView y) {
    for (int64_t i = 0; i < y.rows; ++i) {
      const double row = rows[i];
      const float* in = x.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = static_cast<float>(alpha / (row * columns[j] + shift)) * in[j];
    }
    return absl::OkStatus();
  }

  static absl::Status Gather(absl::Span<const int64_t> rows, absl::Span<const int64_t> columns, ConstMatrixView x,
                             MatrixView y) {
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

  static absl::Status ScaleBothSides(absl::Span<const double> scales, ConstMatrixView x, MatrixView y) {
    for (int64_t i = 0; i < y.rows; ++i) {
      const double scale = scales[i];
      const float* in = x.row(i);
      float* out = y.row(i);
      for (int64_t j = 0; j < y.cols; ++j) out[j] = static_cast<float>(scale * scales[j] * in[j]);
    }
    return absl::OkStatus();
  }

  static absl::Status AddDiagonal(double value, MatrixView a) {
    for (int64_t i = 0; i < a.rows; ++i) a.at(i, i) = static_cast<float>(a.at(i, i) + value);
    return absl::OkStatus();
  }

  // --- Numbers for the host -----------------------------------------------------------------------------------------

  static double Dot(ConstMatrixView x, ConstMatrixView y) {
    double sum = 0;
    for (int64_t i = 0; i < x.rows; ++i) sum += cpu::Dot(x.row(i), y.row(i), x.cols);
    return sum;
  }
  static absl::Status RunOne(const operation::Dot& dot) {
    *dot.out = Dot(dot.x, dot.y);
    return absl::OkStatus();
  }

  static absl::Status RunOne(const operation::RowSquaredNorms& norms) {
    const auto& [x, out] = norms;
    for (int64_t i = 0; i < x.rows; ++i) out[i] = cpu::Dot(x.row(i), x.row(i), x.cols);
    return absl::OkStatus();
  }

  static absl::Status RunOne(const operation::ColumnSquaredNorms& norms) {
    const auto& [x, out] = norms;
    std::fill(out.begin(), out.end(), 0.0);
    for (int64_t i = 0; i < x.rows; ++i) {
      const float* in = x.row(i);
      for (int64_t j = 0; j < x.cols; ++j) out[j] += static_cast<double>(in[j]) * in[j];
    }
    return absl::OkStatus();
  }

  static absl::Status RunOne(const operation::AbsoluteSum& of) {
    const ConstMatrixView x = of.x;
    double sums[4] = {0, 0, 0, 0};
    for (int64_t i = 0; i < x.rows; ++i) {
      const float* in = x.row(i);
      int64_t j = 0;
      for (; j + 4 <= x.cols; j += 4) {
        for (int k = 0; k < 4; ++k) sums[k] += std::fabs(in[j + k]);
      }
      for (; j < x.cols; ++j) sums[0] += std::fabs(in[j]);
    }
    *of.out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return absl::OkStatus();
  }

  static absl::Status RunOne(const operation::AbsoluteMaximum& of) {
    const ConstMatrixView x = of.x;
    float largest = 0;
    bool nan = false;
    for (int64_t i = 0; i < x.rows; ++i) {
      const float* in = x.row(i);
      for (int64_t j = 0; j < x.cols; ++j) {
        largest = std::max(largest, std::fabs(in[j]));
        nan |= std::isnan(in[j]);
      }
    }
    *of.out = nan ? std::numeric_limits<double>::quiet_NaN() : largest;
    return absl::OkStatus();
  }

  static absl::Status RunOne(const operation::Diagonal& of) {
    for (int64_t i = 0; i < of.a.rows; ++i) of.out[i] = of.a.at(i, i);
    return absl::OkStatus();
  }

  static absl::Status PackLower(ConstMatrixView x, MatrixView packed) {
    float* out = packed.data;
    for (int64_t i = 0; i < x.rows; ++i) out = std::copy_n(x.row(i), i + 1, out);
    return absl::OkStatus();
  }

  static absl::Status UnpackLower(ConstMatrixView packed, MatrixView x) {
    const float* in = packed.data;
    for (int64_t i = 0; i < x.rows; in += ++i) std::copy_n(in, i + 1, x.row(i));
    CombineTriangles(x, [](float below, float) { return below; });
    return absl::OkStatus();
  }

  static absl::Status PackRow(ConstMatrixView x, int64_t i, MatrixView packed) {
    std::copy_n(x.data, i + 1, packed.data + i * (i + 1) / 2);
    for (int64_t j = i + 1; j < x.cols; ++j) packed.data[j * (j + 1) / 2 + i] = x.data[j];
    return absl::OkStatus();
  }

  // --- Products and decompositions ----------------------------------------------------------------------------------

  static absl::Status RunOne(const operation::Gemm& gemm) {
    const auto multiply = gemm.symmetric ? cpu::SymmetricGemm : cpu::Gemm;
    multiply(gemm.alpha, gemm.a, gemm.transpose_a, gemm.b, gemm.transpose_b, gemm.beta, gemm.c);
    return absl::OkStatus();
  }

  absl::Status RunOne(const operation::SpdInverse& inverse) {
    const auto& [a, x] = inverse;
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

  absl::Status RunOne(const operation::SymmetricEigen& eigen) {
    const auto& [a, values, q] = eigen;
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

  static absl::Status RunOne(const operation::TriangularMultiply& product) {
    const auto& [side, a, transpose, x] = product;
    cblas_strmm(CblasRowMajor, Blas(side), CblasUpper, Blas(transpose), CblasNonUnit, x.rows, x.cols, 1.0f, a.data,
                a.stride, x.data, x.stride);
    return absl::OkStatus();
  }

  static absl::Status RunOne(const operation::TriangularSolve& product) {
    const auto& [side, a, transpose, x] = product;
    cblas_strsm(CblasRowMajor, Blas(side), CblasUpper, Blas(transpose), CblasNonUnit, x.rows, x.cols, 1.0f, a.data,
                a.stride, x.data, x.stride);
    return absl::OkStatus();
  }

  // The rows of a row-major matrix are the columns of a column-major one.
  absl::Status RunOne(const operation::OrthonormalizeRows& make) {
    const auto& [a, q] = make;
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

  // --- Whole parts of a step ----------------------------------------------------------------------------------------

  // Composites without an implementation in this class.
  template <operation::Composite Kind>
  absl::Status RunOne(const Kind& composite) {
    return RunByPrimitives(composite);
  }

  bool applies_length_rules() const override { return true; }
  absl::Status RunOne(const operation::LowRankPrecondition& product) {
    PRECONDOR_RETURN_IF_ERROR(LowRank(product));
    TellSquares(product.d, product.u, product.squares);
    return absl::OkStatus();
  }
  absl::Status LowRank(const operation::LowRankPrecondition& product) {
    const auto& [out_side, in_side, d, u, precision, squares, rule] = product;
    const int64_t elements = cpu::LowRankScratch(d.rows, d.cols, out_side.vectors.rows, in_side.vectors.rows);
    if (elements == 0) return cpu::LowRankPrecondition(out_side, in_side, d, rule, nullptr, u);
    PRECONDOR_ASSIGN_OR_RETURN(Work scratch, Work::Floats(memory_, elements));
    return cpu::LowRankPrecondition(out_side, in_side, d, rule, scratch.floats(), u);
  }
  static void TellSquares(ConstMatrixView d, ConstMatrixView u, absl::Span<double> squares) {
    if (squares.empty()) return;
    squares[0] = Dot(d, d);
    squares[1] = Dot(u, u);
  }

  absl::Status RunOne(const operation::DensePrecondition& product) {
    DeviceMatrix made_l, made_r;
    PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView left, Expanded(*this, product.l, made_l));
    PRECONDOR_ASSIGN_OR_RETURN(const ConstMatrixView right, Expanded(*this, product.r, made_r));
    PRECONDOR_RETURN_IF_ERROR(DenseProduct(left, right, product.d, product.u));
    TellSquares(product.d, product.u, product.squares);
    return absl::OkStatus();
  }
  absl::Status DenseProduct(ConstMatrixView l, ConstMatrixView r, ConstMatrixView d, MatrixView u) {
    PRECONDOR_ASSIGN_OR_RETURN(Work scratch, Work::Floats(memory_, d.size()));
    const MatrixView half(scratch.floats(), d.rows, d.cols);
    cpu::Gemm(1.0, l, Transpose::kNo, d, Transpose::kNo, 0.0, half);
    cpu::Gemm(1.0, half, Transpose::kNo, r, Transpose::kNo, 0.0, u);
    return absl::OkStatus();
  }

  // --- Matrices in tiles --------------------------------------------------------------------------------------------

  absl::Status RunOne(const operation::SymmetricUpdateMultiply& update) { return cpu::Run(*this, update); }
  absl::Status RunOne(const operation::SymmetricExpand& expand) { return cpu::Run(*this, expand); }

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
