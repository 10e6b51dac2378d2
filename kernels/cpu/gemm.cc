// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cblas.h>

#include "kernels/cpu/vector_ops.h"

#ifdef PRECONDOR_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>

#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
// OpenMP's own interface, declared here because clang 14 lacks its header.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int count);
}
#endif
#endif

namespace precondor::cpu {
namespace {

// oneDNN's products, on the calling thread alone: each call sets its OpenMP team to one thread and restores the size
// afterwards.
namespace onednn {

// The instruction set that oneDNN uses on this processor. kNone: oneDNN is not faster than a BLAS here, or not in the
// build.
enum class Isa : uint8_t { kNone, kAvx2, kAvx512 };

#ifdef PRECONDOR_HAVE_ONEDNN

// Sets this thread's OpenMP team to one thread. OpenMP keeps the number per thread, so neither other threads nor later
// regions of this one see the change.
class OneThread {
 public:
#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP
  static constexpr bool kPossible = true;
  OneThread() : before_(omp_get_max_threads()) {
    if (before_ != 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_ != 1) omp_set_num_threads(before_);
  }

 private:
  const int before_;
#else
  static constexpr bool kPossible = DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_SEQ;
  OneThread() {}
  ~OneThread() {}
#endif
};

Isa FindIsa() {
  if (!OneThread::kPossible) return Isa::kNone;
  const int isa = dnnl_get_effective_cpu_isa();
  if ((isa & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core) return Isa::kAvx512;
  return (isa & dnnl_cpu_isa_avx2) == dnnl_cpu_isa_avx2 ? Isa::kAvx2 : Isa::kNone;
}

char Letter(Transpose transpose) { return transpose == Transpose::kYes ? 'T' : 'N'; }

Isa ProcessorIsa() {
  static const Isa kIsa = FindIsa();
  return kIsa;
}

// c = alpha op(a) op(b) + beta c. Returns false, with c unchanged, if it cannot.
bool Sgemm(float alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, float beta,
           MatrixView c) {
  if (ProcessorIsa() == Isa::kNone) return false;
  const int64_t inner = transpose_a == Transpose::kYes ? a.rows : a.cols;
  const OneThread one;
  return dnnl_sgemm(Letter(transpose_a), Letter(transpose_b), c.rows, c.cols, inner, alpha, a.data, a.stride, b.data,
                    b.stride, beta, c.data, c.stride) == dnnl_success;
}
#else
Isa ProcessorIsa() { return Isa::kNone; }
bool Sgemm(float, ConstMatrixView, Transpose, ConstMatrixView, Transpose, float, MatrixView) { return false; }
#endif

}  // namespace onednn

CBLAS_TRANSPOSE Blas(Transpose transpose) { return transpose == Transpose::kYes ? CblasTrans : CblasNoTrans; }

enum ShapeClass { kTiny, kVector, kSmallResult, kFewRows, kFewColumns, kShortInner, kBulk };

// Shapes longer than this in every direction are kBulk.
constexpr int64_t kThin = 128;
constexpr int64_t kTinyProducts = int64_t{64} * 64 * 64;

ShapeClass Classify(int64_t m, int64_t n, int64_t inner) {
  if (m == 1 || n == 1) return kVector;
  if (m * n * inner <= kTinyProducts) return kTiny;
  if (m <= kThin && n <= kThin) return kSmallResult;
  if (m <= kThin) return kFewRows;
  if (n <= kThin) return kFewColumns;
  return inner <= kThin ? kShortInner : kBulk;
}

// Whether oneDNN 2.6 was faster than OpenBLAS 0.3.21 (medians of `gemm_bench`; docs/develop/lab/kernels.md), by
// ShapeClass and by transposed operands: neither, b, a, both.
constexpr bool kOneDnnIsFaster[2][7][4] = {
    {
        // AVX2
        {false, false, false, false},  // kTiny
        {false, false, false, false},  // kVector
        {true, false, true, false},    // kSmallResult
        {false, false, false, false},  // kFewRows
        {true, true, false, false},    // kFewColumns
        {true, true, true, true},      // kShortInner
        {false, false, false, false},  // kBulk
    },
    {
        // AVX-512
        {false, false, false, false},  // kTiny
        {false, false, false, false},  // kVector
        {true, false, true, false},    // kSmallResult
        {true, true, true, false},     // kFewRows
        {true, true, true, false},     // kFewColumns
        {true, true, true, true},      // kShortInner
        {true, true, true, true},      // kBulk
    },
};

// y = alpha op(matrix) x + beta y for vectors x and y with the given steps between elements.
void Gemv(double alpha, ConstMatrixView matrix, bool transposed, const float* x, int64_t x_step, double beta, float* y,
          int64_t y_step) {
  if (!transposed && x_step == 1 && y_step == 1 && alpha == 1 && beta == 0) return RowProducts(matrix, x, y);
  cblas_sgemv(CblasRowMajor, transposed ? CblasTrans : CblasNoTrans, matrix.rows, matrix.cols,
              static_cast<float>(alpha), matrix.data, matrix.stride, x, x_step, static_cast<float>(beta), y, y_step);
}

void BlasGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
              double beta, MatrixView c) {
  const bool ta = transpose_a == Transpose::kYes, tb = transpose_b == Transpose::kYes;
  if (c.rows == 1) {
    Gemv(alpha, b, !tb, a.data, ta ? a.stride : 1, beta, c.data, 1);
  } else if (c.cols == 1) {
    Gemv(alpha, a, ta, b.data, tb ? 1 : b.stride, beta, c.data, c.stride);
  } else {
    cblas_sgemm(CblasRowMajor, Blas(transpose_a), Blas(transpose_b), c.rows, c.cols, ta ? a.rows : a.cols,
                static_cast<float>(alpha), a.data, a.stride, b.data, b.stride, static_cast<float>(beta), c.data,
                c.stride);
  }
}

// Returns rows [begin, begin + count) of op(x), and columns where `columns` says so, as part of x.
ConstMatrixView Part(ConstMatrixView x, Transpose transpose, bool columns, int64_t begin, int64_t count) {
  if ((transpose == Transpose::kYes) == columns) return x.RowRange(begin, count);
  return {x.data + begin, x.rows, count, x.stride};
}

// Rows of a block of a symmetric product: few enough that the blocks on the diagonal waste little, and enough for a
// library's speed.
int64_t BlockRows(int64_t n) {
  constexpr int64_t kLeast = 64, kMost = 256;
  return std::clamp(n / 8 / kLeast * kLeast, kLeast, kMost);
}

// Copies the part below the diagonal over the part above it.
void MirrorLower(MatrixView c) {
  constexpr int64_t kTile = 16;
  for (int64_t top = 0; top < c.rows; top += kTile) {
    const int64_t bottom = std::min(top + kTile, c.rows);
    for (int64_t left = 0; left < bottom; left += kTile) {
      for (int64_t i = top; i < bottom; ++i) {
        for (int64_t j = left, end = std::min(left + kTile, i); j < end; ++j) c.at(j, i) = c.at(i, j);
      }
    }
  }
}

}  // namespace

GemmLibrary ChooseGemm(int64_t m, int64_t n, int64_t inner, Transpose transpose_a, Transpose transpose_b) {
  const onednn::Isa isa = onednn::ProcessorIsa();
  if (isa == onednn::Isa::kNone) return GemmLibrary::kBlas;
  const int transposed = (transpose_a == Transpose::kYes ? 2 : 0) + (transpose_b == Transpose::kYes ? 1 : 0);
  const auto& table = kOneDnnIsFaster[isa == onednn::Isa::kAvx512 ? 1 : 0];
  return table[Classify(m, n, inner)][transposed] ? GemmLibrary::kOneDnn : GemmLibrary::kBlas;
}

bool GemmBy(GemmLibrary library, double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b,
            Transpose transpose_b, double beta, MatrixView c) {
  if (library == GemmLibrary::kOneDnn) {
    return onednn::Sgemm(static_cast<float>(alpha), a, transpose_a, b, transpose_b, static_cast<float>(beta), c);
  }
  BlasGemm(alpha, a, transpose_a, b, transpose_b, beta, c);
  return true;
}

void Gemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b, double beta,
          MatrixView c) {
  const int64_t inner = transpose_a == Transpose::kYes ? a.rows : a.cols;
  const GemmLibrary choice = ChooseGemm(c.rows, c.cols, inner, transpose_a, transpose_b);
  // oneDNN refuses before it changes c, so OpenBLAS can take over.
  if (GemmBy(choice, alpha, a, transpose_a, b, transpose_b, beta, c)) return;
  GemmBy(GemmLibrary::kBlas, alpha, a, transpose_a, b, transpose_b, beta, c);
}

void SymmetricGemm(double alpha, ConstMatrixView a, Transpose transpose_a, ConstMatrixView b, Transpose transpose_b,
                   double beta, MatrixView c) {
  const int64_t block = BlockRows(c.rows);
  if (c.rows <= block) return Gemm(alpha, a, transpose_a, b, transpose_b, beta, c);
  for (int64_t begin = 0; begin < c.rows; begin += block) {
    const int64_t count = std::min(block, c.rows - begin), end = begin + count;
    Gemm(alpha, Part(a, transpose_a, /*columns=*/false, begin, count), transpose_a,
         Part(b, transpose_b, /*columns=*/true, 0, end), transpose_b, beta,
         c.RowRange(begin, count).Corner(count, end));
  }
  MirrorLower(c);
}

}  // namespace precondor::cpu
