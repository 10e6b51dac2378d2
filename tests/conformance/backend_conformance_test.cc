// SPDX-License-Identifier: Apache-2.0
// One suite over every backend (tests/support/test_backend.h), against loops over doubles.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/backend.h"
#include "kernels/base/random.h"
#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/device_dense.h"
#include "tests/support/random_dense.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using reference::Dense;
using testing::HasSubstr;

constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

using Guarded = GuardedMatrix;

// Symmetric positive definite with the given condition, from a product of random reflections of a diagonal.
Dense SpdMatrix(int64_t n, double condition, uint64_t seed) {
  Dense a = reference::Identity(n);
  for (int64_t i = 0; i < n; ++i) a.at(i, i) = std::pow(condition, n == 1 ? 0.0 : -static_cast<double>(i) / (n - 1));
  for (int reflection = 0; reflection < 3; ++reflection) {
    const Dense v = Uniform(n, 1, seed + reflection);
    const double norm = FrobeniusNorm(v);
    Dense h = reference::Identity(n);
    if (norm > 0) {
      h = reference::Combination(1, h, -2 / (norm * norm), reference::Product(v, reference::Transposed(v)));
    }
    a = reference::Product(reference::Product(h, a), h);
  }
  for (double& x : a.data) x = static_cast<float>(x);
  return a;
}

class BackendConformanceTest : public testing::Test {
 protected:
  void SetUp() override { backend_ = MakeTestBackend(); }
  Guarded Put(const Dense& m) { return Guarded(*backend_, m); }
  std::unique_ptr<Backend> backend_;
};

TEST_F(BackendConformanceTest, AllocatesZeroedMemoryAndCountsIt) {
  {
    DeviceMatrix a = backend_->Allocate(3, 5).value();
    EXPECT_EQ(backend_->allocated_bytes(), 60);
    std::vector<float> host(15, 1.0f);
    ASSERT_TRUE(backend_->Download(a.view(), MatrixView(host.data(), 3, 5)).ok());
    EXPECT_THAT(host, testing::Each(0.0f));
    DeviceMatrix moved = std::move(a);
    EXPECT_EQ(moved.rows(), 3);
    EXPECT_TRUE(backend_->Allocate(0, 7).value().empty());
  }
  EXPECT_EQ(backend_->allocated_bytes(), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(backend_->Allocate(-1, 2).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(backend_->Allocate(int64_t{1} << 40, int64_t{1} << 40).status()));
}

TEST_F(BackendConformanceTest, GemmMatchesTheDefinition) {
  const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 1, 33}, {1, 64, 1}, {65, 63, 130}, {2, 300, 2}, {4, 0, 3}};
  for (const auto& [m, k, n] : sizes) {
    for (bool ta : {false, true}) {
      for (bool tb : {false, true}) {
        for (const auto& [alpha, beta] : {std::pair(1.0, 0.0), std::pair(-0.5, 1.0), std::pair(2.0, -0.25)}) {
          const Dense a = Uniform(m, k, 1), b = Uniform(k, n, 2), c = Uniform(m, n, 3);
          Guarded da = Put(ta ? reference::Transposed(a) : a), db = Put(tb ? reference::Transposed(b) : b), dc = Put(c);
          ASSERT_TRUE(backend_->Gemm(alpha, da.view(), Transpose(ta), db.view(), Transpose(tb), beta, dc.view()).ok());
          const Dense expected = reference::Combination(alpha, reference::Product(a, b), beta, c);
          // Each element sums k products of numbers below 1: error at most about (k + 2) eps (|alpha| k + |beta|).
          const double bound = (k + 2) * kEpsilon * (std::fabs(alpha) * k + std::fabs(beta));
          const Dense got = dc.Read();
          for (size_t i = 0; i < got.data.size(); ++i) ASSERT_NEAR(got.data[i], expected.data[i], bound);
        }
      }
    }
  }
}

TEST_F(BackendConformanceTest, BetaZeroIgnoresWhatWasThere) {
  Guarded a = Put(Uniform(3, 4, 1)), b = Put(Uniform(4, 2, 2)), c = Put(Dense(3, 2, NAN)), y = Put(Dense(3, 4, NAN));
  ASSERT_TRUE(backend_->Gemm(1, a.view(), Transpose::kNo, b.view(), Transpose::kNo, 0, c.view()).ok());
  ASSERT_TRUE(backend_->Axpby(1, a.view(), 0, y.view()).ok());
  for (double x : c.Read().data) EXPECT_TRUE(std::isfinite(x));
  for (double x : y.Read().data) EXPECT_TRUE(std::isfinite(x));
}

TEST_F(BackendConformanceTest, ZeroCoefficientsIgnoreTheirMatrices) {
  const Dense y = Uniform(5, 9, 3), nan(5, 9, NAN);
  Guarded dy = Put(y), dnan = Put(nan), empty_a = Put(Dense(5, 0)), empty_b = Put(Dense(0, 9));
  ASSERT_TRUE(backend_->Axpby(0, dnan.view(), -2, dy.view()).ok());
  EXPECT_EQ(dy.Read().data, reference::Combination(-2, y, 0, y).data);
  ASSERT_TRUE(backend_->Axpby(0, dnan.view(), 0, dnan.view()).ok());
  EXPECT_EQ(dnan.Read().data, Dense(5, 9).data);
  // An empty sum is 0; infinities in c survive beta == 1.
  Dense infinite = y;
  infinite.at(2, 3) = INFINITY;
  Guarded c = Put(infinite);
  ASSERT_TRUE(backend_->Gemm(1, empty_a.view(), Transpose::kNo, empty_b.view(), Transpose::kNo, 1, c.view()).ok());
  EXPECT_EQ(c.Read().data, infinite.data);
  ASSERT_TRUE(backend_->Gemm(1, empty_a.view(), Transpose::kNo, empty_b.view(), Transpose::kNo, 0, c.view()).ok());
  EXPECT_EQ(c.Read().data, Dense(5, 9).data);
}

TEST_F(BackendConformanceTest, TakesInPlaceOperandsWhereTheContractAllows) {
  const Dense x = Uniform(37, 37, 4);
  const std::vector<double> scales(37, 0.5);
  Guarded axpby = Put(x), both = Put(x);
  ASSERT_TRUE(backend_->Axpby(2, axpby.view(), 2, axpby.view()).ok());
  ASSERT_TRUE(backend_->ScaleBothSides(scales, both.view(), both.view()).ok());
  EXPECT_EQ(axpby.Read().data, reference::Combination(4, x, 0, x).data) << "powers of two: exact in f32";
  EXPECT_EQ(both.Read().data, reference::Combination(0.25, x, 0, x).data);
}

TEST_F(BackendConformanceTest, TakesMatricesWithoutElements) {
  Guarded rows = Put(Dense(0, 4)), columns = Put(Dense(3, 0)), square = Put(Dense(0, 0)), three = Put(Uniform(3, 4, 1));
  std::vector<double> none, norms(3, 7.0);
  EXPECT_TRUE(backend_->Copy(rows.view(), rows.view()).ok());
  EXPECT_TRUE(backend_->Axpby(1, columns.view(), 1, columns.view()).ok());
  EXPECT_TRUE(
      backend_->Gemm(1, rows.view(), Transpose::kNo, three.view(), Transpose::kYes, 0, Put(Dense(0, 3)).view()).ok());
  EXPECT_EQ(*backend_->Dot(rows.view(), rows.view()), 0.0);
  EXPECT_TRUE(backend_->RowSquaredNorms(columns.view(), absl::MakeSpan(norms)).ok());
  EXPECT_THAT(norms, testing::Each(0.0));
  EXPECT_EQ(*backend_->AbsoluteSum(rows.view()), 0.0);
  EXPECT_EQ(*backend_->AbsoluteMaximum(columns.view()), 0.0);
  std::vector<double> four(4, 7.0);
  EXPECT_TRUE(backend_->ColumnSquaredNorms(rows.view(), absl::MakeSpan(four)).ok());
  EXPECT_THAT(four, testing::Each(0.0));
  EXPECT_TRUE(backend_->TriangularSolve(From::kLeft, square.view(), Transpose::kNo, rows.view()).ok());
  EXPECT_TRUE(backend_->OrthonormalizeRows(rows.view(), rows.view()).ok());
  EXPECT_TRUE(backend_->SpdInverse(square.view(), square.view()).ok());
  EXPECT_TRUE(backend_->SymmetricEigen(square.view(), absl::MakeSpan(none), square.view()).ok());
  EXPECT_TRUE(backend_->LowRankPrecondition({}, {}, rows.view(), rows.view()).ok());
}

TEST_F(BackendConformanceTest, PackedTrianglesHoldTheLowerRowsAndComeBackSymmetric) {
  for (const int64_t n : {1, 2, 7, 33}) {
    const Dense x = Uniform(n, n, 6);
    Guarded dx = Put(x), packed = Put(Uniform(1, n * (n + 1) / 2, 7)), back = Put(Uniform(n, n, 8));
    ASSERT_TRUE(backend_->PackLower(dx.view(), packed.view()).ok());
    ASSERT_TRUE(backend_->UnpackLower(packed.view(), back.view()).ok());
    const Dense got = packed.Read(), got_back = back.Read();
    int64_t place = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        EXPECT_EQ(got.at(0, place++), x.at(i, j));
        EXPECT_EQ(got_back.at(i, j), x.at(i, j));
        EXPECT_EQ(got_back.at(j, i), x.at(i, j));
      }
    }
    EXPECT_EQ(dx.Read().data, x.data);
  }
}

TEST_F(BackendConformanceTest, ARowOfAPackedMatrixIsItsColumnToo) {
  for (const int64_t n : {1, 2, 33}) {
    for (const int64_t row : {int64_t{0}, n / 2, n - 1}) {
      const Dense before = Uniform(1, n * (n + 1) / 2, 6), x = Uniform(1, n, 7);
      Guarded packed = Put(before), dx = Put(x);
      ASSERT_TRUE(backend_->PackRow(dx.view(), row, packed.view()).ok());
      const Dense got = packed.Read();
      for (int64_t i = 0, place = 0; i < n; ++i) {
        for (int64_t j = 0; j <= i; ++j, ++place) {
          EXPECT_EQ(got.at(0, place), i == row ? x.at(0, j) : j == row ? x.at(0, i) : before.at(0, place));
        }
      }
    }
  }
}

TEST_F(BackendConformanceTest, ElementwiseOperationsMatchTheirDefinitions) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(1, 1), {7, 7}, {33, 33}}) {
    const Dense x = Uniform(rows, cols, 4), y = Uniform(rows, cols, 5);
    std::vector<double> scales;
    for (int64_t i = 0; i < rows; ++i) scales.push_back(0.25 + 0.5 * static_cast<double>(i));
    Guarded dx = Put(x), axpby = Put(y), rescaled = Put(y), both = Put(y), diagonal = Put(x), symmetric = Put(x),
            in_place = Put(x), copied = Put(y), dy = Put(y), combined = Put(Dense(rows, cols, NAN));
    ASSERT_TRUE(backend_->Axpby(0.5, dx.view(), -2, axpby.view()).ok());
    ASSERT_TRUE(backend_->Combine(0.5, dx.view(), -2, dy.view(), combined.view()).ok());
    ASSERT_TRUE(backend_->ScaleRows(scales, dx.view(), rescaled.view()).ok());
    ASSERT_TRUE(backend_->ScaleRows(scales, in_place.view(), in_place.view()).ok());
    ASSERT_TRUE(backend_->ScaleBothSides(scales, dx.view(), both.view()).ok());
    ASSERT_TRUE(backend_->AddDiagonal(0.75, diagonal.view()).ok());
    ASSERT_TRUE(backend_->Symmetrize(symmetric.view()).ok());
    ASSERT_TRUE(backend_->Copy(dx.view(), copied.view()).ok());
    const Dense got_axpby = axpby.Read(), got_rows = rescaled.Read(), got_in_place = in_place.Read(),
                got_both = both.Read(), got_diagonal = diagonal.Read(), got_symmetric = symmetric.Read();
    EXPECT_EQ(copied.Read().data, x.data);
    EXPECT_EQ(combined.Read().data, got_axpby.data);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        // Two or three roundings of the result's magnitude.
        const double bound = 4 * kEpsilon * (1 + scales[i] * scales[j]);
        EXPECT_NEAR(got_axpby.at(i, j), 0.5 * x.at(i, j) - 2 * y.at(i, j), 4 * bound);
        EXPECT_NEAR(got_rows.at(i, j), scales[i] * x.at(i, j), bound + scales[i] * kEpsilon);
        EXPECT_EQ(got_in_place.at(i, j), got_rows.at(i, j));
        EXPECT_NEAR(got_both.at(i, j), scales[i] * x.at(i, j) * scales[j], bound);
        EXPECT_NEAR(got_diagonal.at(i, j), x.at(i, j) + (i == j ? 0.75 : 0.0), bound);
        EXPECT_NEAR(got_symmetric.at(i, j), (x.at(i, j) + x.at(j, i)) / 2, bound);
        EXPECT_EQ(got_symmetric.at(i, j), got_symmetric.at(j, i));
      }
    }
  }
}

TEST_F(BackendConformanceTest, OperationsElementByElementMatchTheirDefinitions) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(1, 1), {7, 3}, {5, 66}}) {
    const Dense x = Uniform(rows, cols, 4), y = Uniform(rows, cols, 5), z = Uniform(rows, cols, 6);
    Dense v = Uniform(rows, cols, 7);
    for (double& element : v.data) element = static_cast<float>(element * element);
    v.at(0, 0) = 0;
    std::vector<double> scales;
    for (int64_t j = 0; j < cols; ++j) scales.push_back(0.25 + 0.5 * static_cast<double>(j));
    Guarded dx = Put(x), dy = Put(y), dv = Put(v), columns = Put(y), product = Put(Dense(rows, cols, NAN)),
            sum = Put(z), squares = Put(x), quotient = Put(y), in_place = Put(v);
    ASSERT_TRUE(backend_->ScaleColumns(scales, dx.view(), columns.view()).ok());
    ASSERT_TRUE(backend_->MultiplyElements(-3, dx.view(), dy.view(), 0, product.view()).ok());
    ASSERT_TRUE(backend_->MultiplyElements(0.5, dx.view(), dy.view(), 0.25, sum.view()).ok());
    ASSERT_TRUE(backend_->MultiplyElements(1, squares.view(), squares.view(), 0, squares.view()).ok());
    ASSERT_TRUE(backend_->DivideByRoot(1.5, dx.view(), dv.view(), 0.25, quotient.view()).ok());
    ASSERT_TRUE(backend_->DivideByRoot(1, in_place.view(), in_place.view(), 0.25, in_place.view()).ok());
    const Dense got_columns = columns.Read(), got_product = product.Read(), got_sum = sum.Read(),
                got_squares = squares.Read(), got_quotient = quotient.Read(), got_in_place = in_place.Read();
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        // At most four roundings; a quotient is at most 1.5 / 0.25.
        const double a = x.at(i, j), b = y.at(i, j), c = v.at(i, j);
        EXPECT_NEAR(got_columns.at(i, j), scales[j] * a, scales[j] * kEpsilon);
        EXPECT_NEAR(got_product.at(i, j), -3 * a * b, 3 * kEpsilon);
        EXPECT_NEAR(got_sum.at(i, j), 0.5 * a * b + 0.25 * z.at(i, j), kEpsilon);
        EXPECT_NEAR(got_squares.at(i, j), a * a, kEpsilon);
        EXPECT_NEAR(got_quotient.at(i, j), 1.5 * a / (std::sqrt(c) + 0.25), 24 * kEpsilon);
        EXPECT_NEAR(got_in_place.at(i, j), c / (std::sqrt(c) + 0.25), 4 * kEpsilon);
      }
    }
  }
}

// Divisors far beyond f32 are as exact as others: only their quotients have to fit.
TEST_F(BackendConformanceTest, DivideByOuterMatchesItsDefinition) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(1, 1), {7, 3}, {5, 66}}) {
    const Dense x = Uniform(rows, cols, 8);
    for (const double size : {1.0, 1e30, 1e-30}) {
      std::vector<double> down, across;
      for (int64_t i = 0; i < rows; ++i) down.push_back(size * static_cast<double>(i));
      for (int64_t j = 0; j < cols; ++j) across.push_back(size * (0.5 + static_cast<double>(j)));
      const double shift = 1e-3 * size * size, alpha = 3e-3 * size * size;
      Guarded dx = Put(x), y = Put(Dense(rows, cols, NAN)), in_place = Put(x);
      ASSERT_TRUE(backend_->DivideByOuter(alpha, down, across, shift, dx.view(), y.view()).ok());
      ASSERT_TRUE(backend_->DivideByOuter(alpha, down, across, shift, in_place.view(), in_place.view()).ok());
      const Dense got = y.Read();
      EXPECT_EQ(in_place.Read().data, got.data);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          const double expected = alpha * x.at(i, j) / (down[i] * across[j] + shift);
          EXPECT_NEAR(got.at(i, j), expected, 2 * kEpsilon * std::abs(expected));  // a factor and a product
        }
      }
    }
  }
}

TEST_F(BackendConformanceTest, ReductionsAccumulateInDouble) {
  // A sum that f32 accumulation loses entirely: 2^24 + many ones.
  Dense x(2, 4097, 1.0);
  x.at(0, 0) = 4096;
  x.at(1, 4096) = -4096;
  Guarded dx = Put(x), square = Put(Uniform(5, 5, 6));
  EXPECT_EQ(*backend_->Dot(dx.view(), dx.view()), 2 * (4096.0 * 4096.0 + 4096));
  std::vector<double> norms(2), diagonal(5);
  ASSERT_TRUE(backend_->RowSquaredNorms(dx.view(), absl::MakeSpan(norms)).ok());
  EXPECT_THAT(norms, testing::Each(4096.0 * 4096.0 + 4096));
  std::vector<double> columns(4097);
  ASSERT_TRUE(backend_->ColumnSquaredNorms(dx.view(), absl::MakeSpan(columns)).ok());
  EXPECT_EQ(columns[0], 4096.0 * 4096.0 + 1);
  EXPECT_EQ(columns[1], 2.0);
  EXPECT_EQ(columns[4096], 4096.0 * 4096.0 + 1);
  EXPECT_EQ(*backend_->AbsoluteMaximum(dx.view()), 4096.0);
  Dense ones(2, 4097, 1.0);
  ones.at(0, 0) = 16777216;  // f32 cannot count on from here
  ones.at(1, 7) = -1;
  Guarded dones = Put(ones);
  EXPECT_EQ(*backend_->AbsoluteSum(dones.view()), 16777216.0 + 2 * 4097 - 1);
  ASSERT_TRUE(backend_->Diagonal(square.view(), absl::MakeSpan(diagonal)).ok());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(diagonal[i], Uniform(5, 5, 6).at(i, i));
}

TEST_F(BackendConformanceTest, ReductionsShowWhatIsNotFinite) {
  for (float bad : {NAN, INFINITY}) {
    Dense x = Uniform(3, 50, 7);
    x.at(1, 37) = bad;
    Guarded dx = Put(x);
    EXPECT_FALSE(std::isfinite(*backend_->Dot(dx.view(), dx.view())));
    std::vector<double> norms(3);
    ASSERT_TRUE(backend_->RowSquaredNorms(dx.view(), absl::MakeSpan(norms)).ok());
    EXPECT_TRUE(std::isfinite(norms[0]));
    EXPECT_FALSE(std::isfinite(norms[1]));
    std::vector<double> columns(50);
    ASSERT_TRUE(backend_->ColumnSquaredNorms(dx.view(), absl::MakeSpan(columns)).ok());
    EXPECT_TRUE(std::isfinite(columns[36]));
    EXPECT_FALSE(std::isfinite(columns[37]));
    EXPECT_FALSE(std::isfinite(*backend_->AbsoluteSum(dx.view())));
    const double largest = *backend_->AbsoluteMaximum(dx.view());
    EXPECT_EQ(std::isnan(largest), std::isnan(bad));
    EXPECT_FALSE(std::isfinite(largest));
  }
}

TEST_F(BackendConformanceTest, SpdInverseInverts) {
  for (int64_t n : {1, 2, 17, 64, 129}) {
    for (double condition : {1.0, 1e3, 1e8}) {
      const Dense a = SpdMatrix(n, condition, 8);
      Guarded da = Put(a), x = Put(Dense(n, n, NAN));
      if (condition == 1e8 && n > 1) {
        // The rounding of a to f32 may leave it indefinite: an answer or a refusal, but no crash and no NaN.
        if (!backend_->SpdInverse(da.view(), x.view()).ok()) continue;
        for (double value : x.Read().data) ASSERT_TRUE(std::isfinite(value));
        continue;
      }
      ASSERT_TRUE(backend_->SpdInverse(da.view(), x.view()).ok()) << n << " " << condition;
      // Inverted in f64 from exact elements, so that rounding the result to f32 is all that is lost: |A X - I| is at
      // most |A| |dX| <= n eps condition.
      const Dense product = reference::Product(a, x.Read());
      EXPECT_LE(Distance(product, reference::Identity(n)), n * kEpsilon * condition) << n << " " << condition;
      ASSERT_TRUE(backend_->SpdInverse(da.view(), da.view()).ok()) << "in place";
      EXPECT_EQ(da.Read().data, x.Read().data);
    }
  }
}

// E A E for a well-conditioned A and powers of two E has the condition |E|^4 and an inverse known element by element.
TEST_F(BackendConformanceTest, SpdInverseKeepsEveryElementAtConditionOneEPlus8) {
  for (int64_t n : {2, 17, 65}) {
    const Dense a = SpdMatrix(n, 4, 24);
    Dense scaled = a, expected = reference::SpdInverse(a);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const double factor = std::exp2(i % 2 * 14 + j % 2 * 14);
        scaled.at(i, j) *= factor;
        expected.at(i, j) /= factor;
      }
    }
    Guarded da = Put(scaled), x = Put(Dense(n, n, NAN));
    ASSERT_TRUE(backend_->SpdInverse(da.view(), x.view()).ok());
    const Dense got = x.Read();
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        // A decomposition in f64 loses nothing that f32 could see; elements of A^-1 are at most 4.
        const double unit = std::exp2(-(i % 2 * 14 + j % 2 * 14));
        EXPECT_NEAR(got.at(i, j), expected.at(i, j), 4 * kEpsilon * unit) << n << ": " << i << ", " << j;
      }
    }
  }
}

TEST_F(BackendConformanceTest, SpdInverseReadsTheLowerTriangleAlone) {
  const Dense a = SpdMatrix(33, 10, 25);
  Dense poisoned = a;
  for (int64_t i = 0; i < 33; ++i) {
    for (int64_t j = i + 1; j < 33; ++j) poisoned.at(i, j) = NAN;
  }
  Guarded whole = Put(a), half = Put(poisoned);
  ASSERT_TRUE(backend_->SpdInverse(whole.view(), whole.view()).ok());
  ASSERT_TRUE(backend_->SpdInverse(half.view(), half.view()).ok());
  EXPECT_EQ(half.Read().data, whole.Read().data);
}

TEST_F(BackendConformanceTest, SpdInverseRefusesAndLeavesItsOutputAlone) {
  Dense indefinite = reference::Identity(4), nan = reference::Identity(4);
  indefinite.at(2, 2) = -1;
  nan.at(3, 1) = NAN;
  for (const Dense& a : {indefinite, nan, Dense(4, 4, 0.0)}) {
    Guarded da = Put(a), x = Put(Uniform(4, 4, 9));
    EXPECT_TRUE(absl::IsFailedPrecondition(backend_->SpdInverse(da.view(), x.view())));
    EXPECT_EQ(x.Read().data, Uniform(4, 4, 9).data);
  }
}

TEST_F(BackendConformanceTest, SymmetricEigenDecomposes) {
  for (int64_t n : {1, 2, 17, 64, 129}) {
    Dense rank_deficient = Uniform(n, std::max<int64_t>(1, n / 3), 10);
    rank_deficient = reference::Product(rank_deficient, reference::Transposed(rank_deficient));
    for (double& x : rank_deficient.data) x = static_cast<float>(x);
    for (const Dense& a : {SpdMatrix(n, 1e6, 11), rank_deficient, Dense(n, n, 0.0)}) {
      Guarded da = Put(a), dq = Put(Dense(n, n, NAN));
      std::vector<double> values(n);
      ASSERT_TRUE(backend_->SymmetricEigen(da.view(), absl::MakeSpan(values), dq.view()).ok());
      const Dense q = dq.Read();
      Dense scaled = q;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) scaled.at(i, j) *= values[i];
        if (i > 0) {
          EXPECT_LE(values[i - 1], values[i]);
        }
      }
      // f64 inside; the vectors are rounded to f32 once, each by eps / 2 relative to 1.
      EXPECT_LE(Distance(reference::Product(reference::Transposed(q), scaled), a),
                n * kEpsilon * (1 + FrobeniusNorm(a)));
      EXPECT_LE(Distance(reference::Product(q, reference::Transposed(q)), reference::Identity(n)), n * kEpsilon);
    }
  }
  Dense nan = reference::Identity(3);
  nan.at(2, 0) = INFINITY;
  Guarded da = Put(nan), dq = Put(Uniform(3, 3, 12));
  std::vector<double> values(3, 42.0);
  EXPECT_TRUE(absl::IsFailedPrecondition(backend_->SymmetricEigen(da.view(), absl::MakeSpan(values), dq.view())));
  EXPECT_THAT(values, testing::Each(42.0));
  EXPECT_EQ(dq.Read().data, Uniform(3, 3, 12).data);
}

// n x n, upper triangular, with a diagonal away from 0.
Dense UpperTriangular(int64_t n, uint64_t seed) {
  Dense a = Uniform(n, n, seed);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) a.at(i, j) = 0;
    a.at(i, i) = 2 + std::fabs(a.at(i, i));
    for (int64_t j = i + 1; j < n; ++j) a.at(i, j) = static_cast<float>(a.at(i, j) / n);
  }
  return a;
}

TEST_F(BackendConformanceTest, TriangularOperationsMatchTheDefinitions) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {9, 14}, {70, 33}, {1, 65}, {65, 1}}) {
    for (const From side : {From::kLeft, From::kRight}) {
      const int64_t size = side == From::kLeft ? m : n;
      const Dense a = UpperTriangular(size, 31), x = Uniform(m, n, 32);
      Dense poisoned = a;
      for (int64_t i = 0; i < size; ++i) {
        for (int64_t j = 0; j < i; ++j) poisoned.at(i, j) = NAN;
      }
      for (const bool transpose : {false, true}) {
        Guarded da = Put(poisoned), product = Put(x), solution = Put(x);
        ASSERT_TRUE(backend_->TriangularMultiply(side, da.view(), Transpose(transpose), product.view()).ok());
        ASSERT_TRUE(backend_->TriangularSolve(side, da.view(), Transpose(transpose), solution.view()).ok());
        const Dense op = transpose ? reference::Transposed(a) : a;
        const auto apply = [&](const Dense& to) {
          return side == From::kLeft ? reference::Product(op, to) : reference::Product(to, op);
        };
        // Rows of a sum to less than 4; sums of `size` products.
        EXPECT_LE(Distance(product.Read(), apply(x)), (size + 2) * kEpsilon * 4 * FrobeniusNorm(x));
        EXPECT_LE(Distance(apply(solution.Read()), x), (size + 2) * kEpsilon * 4 * FrobeniusNorm(x));
      }
    }
  }
}

TEST_F(BackendConformanceTest, OrthonormalizeRowsDecomposes) {
  for (const auto& [n, d] : {std::pair<int64_t, int64_t>(1, 1), {1, 7}, {5, 9}, {33, 33}, {64, 130}}) {
    Dense a = Uniform(n, d, 33);
    for (int64_t j = 0; j < d; ++j) a.at(n - 1, j) *= 1e-4;
    Guarded da = Put(a), dq = Put(Dense(n, d, NAN));
    ASSERT_TRUE(backend_->OrthonormalizeRows(da.view(), dq.view()).ok());
    ASSERT_TRUE(backend_->OrthonormalizeRows(da.view(), da.view()).ok());
    const Dense q = dq.Read(), l = reference::Product(a, reference::Transposed(q));
    EXPECT_EQ(da.Read().data, q.data) << "in place";
    // f64 inside; the vectors are rounded to f32 once.
    EXPECT_LE(Distance(reference::Product(q, reference::Transposed(q)), reference::Identity(n)), n * kEpsilon);
    EXPECT_LE(Distance(reference::Product(l, q), a), n * kEpsilon * FrobeniusNorm(a));
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_GT(l.at(i, i), 0);
      for (int64_t j = i + 1; j < n; ++j) EXPECT_NEAR(l.at(i, j), 0, d * kEpsilon);
    }
  }
  // Dependent rows still give an orthonormal set.
  Dense rank_one(4, 6, 1.0);
  Guarded da = Put(rank_one);
  ASSERT_TRUE(backend_->OrthonormalizeRows(da.view(), da.view()).ok());
  const Dense q = da.Read();
  EXPECT_LE(Distance(reference::Product(q, reference::Transposed(q)), reference::Identity(4)), 4 * kEpsilon);
  Dense bad = Uniform(3, 4, 34);
  bad.at(1, 2) = INFINITY;
  Guarded dbad = Put(bad), out = Put(Uniform(3, 4, 35));
  EXPECT_TRUE(absl::IsFailedPrecondition(backend_->OrthonormalizeRows(dbad.view(), out.view())));
  EXPECT_EQ(out.Read().data, Uniform(3, 4, 35).data);
}

TEST_F(BackendConformanceTest, GatherPicksRowsAndColumns) {
  const Dense x = Uniform(5, 7, 36);
  const std::vector<int64_t> rows = {4, 0, 0, 2}, columns = {6, 1, 5};
  for (const bool by_row : {false, true}) {
    for (const bool by_column : {false, true}) {
      const int64_t m = by_row ? 4 : 5, n = by_column ? 3 : 7;
      Guarded dx = Put(x), dy = Put(Dense(m, n, NAN));
      ASSERT_TRUE(backend_
                      ->Gather(by_row ? rows : std::vector<int64_t>(), by_column ? columns : std::vector<int64_t>(),
                               dx.view(), dy.view())
                      .ok());
      const Dense y = dy.Read();
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          EXPECT_EQ(y.at(i, j), x.at(by_row ? rows[i] : i, by_column ? columns[j] : j));
        }
      }
    }
  }
}

TEST_F(BackendConformanceTest, FillNormalGivesTheStreamsNumbers) {
  const CounterRandom random({7, 8});
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {3, 5}, {5, 40000}, {70000, 1}}) {
    std::vector<float> expected(m * n);
    random.Normals(0, absl::MakeSpan(expected));
    Guarded dx = Put(Dense(m, n, NAN));
    ASSERT_TRUE(backend_->FillNormal(random, dx.view()).ok());
    const Dense x = dx.Read();
    // Another device's logarithm may differ in its last bits.
    for (size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(x.data[i], expected[i], 8 * kEpsilon);
  }
}

TEST_F(BackendConformanceTest, LowRankPreconditionMatchesTheMatricesItStandsFor) {
  const int64_t sizes[][4] = {{1, 1, 1, 1},  {9, 13, 3, 5},   {40, 70, 8, 16}, {33, 65, 0, 4}, {33, 65, 7, 0},
                              {12, 5, 0, 0}, {70, 40, 16, 8}, {65, 33, 0, 5},  {65, 33, 6, 0}, {31, 31, 4, 40}};
  for (const auto& [m, n, p, q] : sizes) {
    const Dense d = Uniform(m, n, 13), pv = Uniform(p, m, 14), qv = Uniform(q, n, 15);
    Dense s = SpdMatrix(std::max<int64_t>(p, 1), 10, 16), t = SpdMatrix(std::max<int64_t>(q, 1), 10, 17);
    const auto form = [](double c, const Dense& vectors, const Dense& core, int64_t size) {
      Dense j = reference::Identity(size);
      if (vectors.rows > 0) {
        j = reference::Combination(
            1, j, -1, reference::Product(reference::Transposed(vectors), reference::Product(core, vectors)));
      }
      return reference::Combination(c, j, 0, j);
    };
    const Dense expected = reference::Product(reference::Product(form(0.5, pv, s, m), d), form(3.0, qv, t, n));
    Guarded dd = Put(d), dp = Put(pv), dq = Put(qv), ds = Put(s), dt = Put(t), u = Put(Dense(m, n, NAN));
    LowRankInverse out_side{0.5, {}, {}}, in_side{3.0, {}, {}};
    if (p > 0) out_side = {0.5, dp.view(), ds.view()};
    if (q > 0) in_side = {3.0, dq.view(), dt.view()};
    ASSERT_TRUE(backend_->LowRankPrecondition(out_side, in_side, dd.view(), u.view()).ok());
    // Intermediates are as large as |P'SP| |D| |Q'TQ|; inner sizes add their roundings.
    const double magnitude = 1.5 * (1 + p * m) * (1 + q * n) * FrobeniusNorm(d);
    EXPECT_LE(Distance(u.Read(), expected), (m + n + p + q) * kEpsilon * magnitude) << m << "x" << n;
    EXPECT_LE(Distance(u.Read(), expected), 1e-4 * (1 + FrobeniusNorm(expected))) << m << "x" << n;
  }
}

TEST_F(BackendConformanceTest, DensePreconditionMatchesTheDefinition) {
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>(1, 1), {9, 14}, {70, 33}}) {
    const Dense l = SpdMatrix(m, 100, 18), r = SpdMatrix(n, 100, 19), d = Uniform(m, n, 20);
    Guarded dl = Put(l), dr = Put(r), dd = Put(d), u = Put(Dense(m, n, NAN));
    ASSERT_TRUE(backend_->DensePrecondition(dl.view(), dr.view(), dd.view(), u.view()).ok());
    const Dense expected = reference::Product(reference::Product(l, d), r);
    EXPECT_LE(Distance(u.Read(), expected), (m + n) * kEpsilon * FrobeniusNorm(d) * 4);
  }
}

TEST_F(BackendConformanceTest, ShapeErrorsNameOperationAndOperand) {
  Guarded a = Put(Uniform(3, 4, 1)), b = Put(Uniform(3, 4, 2)), c = Put(Uniform(4, 4, 3)), v = Put(Uniform(2, 3, 4)),
          one = Put(Uniform(1, 1, 5));
  std::vector<double> three(3), four(4);
  const std::vector<std::pair<absl::Status, std::vector<std::string>>> cases = {
      {backend_->Gemm(1, a.view(), Transpose::kNo, b.view(), Transpose::kNo, 0, c.view()), {"Gemm", ": a:", "[3, 4]"}},
      {backend_->Gemm(1, c.view(), Transpose::kNo, b.view(), Transpose::kNo, 0, c.view()), {"Gemm", ": b:"}},
      {backend_->Axpby(1, a.view(), 0, c.view()), {"Combine", ": y:", "expected [3, 4], got [4, 4]"}},
      {backend_->Copy(a.view(), c.view()), {"Copy", "to"}},
      {backend_->Upload(a.view(), c.view()), {"Upload", "device"}},
      {backend_->Download(a.view(), c.view()), {"Download", "host"}},
      {backend_->ScaleRows(four, a.view(), b.view()), {"ScaleRows", "scales", "expected 3 elements, got 4"}},
      {backend_->ScaleBothSides(three, a.view(), b.view()), {"ScaleBothSides", "x"}},
      {backend_->ScaleColumns(three, a.view(), b.view()), {"ScaleColumns", "scales", "expected 4 elements, got 3"}},
      {backend_->MultiplyElements(1, a.view(), c.view(), 0, b.view()), {"MultiplyElements", ": y:"}},
      {backend_->DivideByRoot(1, a.view(), c.view(), 1, b.view()), {"DivideByRoot", ": v:"}},
      {backend_->DivideByOuter(1, four, four, 1, a.view(), b.view()), {"DivideByOuter", "rows", "expected 3"}},
      {backend_->DivideByOuter(1, three, three, 1, a.view(), b.view()), {"DivideByOuter", "columns", "expected 4"}},
      {backend_->Gather({0, 3}, {}, a.view(), v.view()), {"Gather", ": y:", "expected [2, 4], got [2, 3]"}},
      {backend_->Gather({0, 3}, {1, 2, 0}, a.view(), v.view()), {"Gather", ": rows:", "[0, 3), got 3"}},
      {backend_->Gather({0, 1}, {1, -2, 0}, a.view(), v.view()), {"Gather", ": columns:", "[0, 4), got -2"}},
      {backend_->TriangularSolve(From::kLeft, c.view(), Transpose::kNo, a.view()), {"TriangularSolve", ": a:"}},
      {backend_->TriangularMultiply(From::kRight, b.view(), Transpose::kNo, a.view()), {"TriangularMultiply", ": a:"}},
      {backend_->OrthonormalizeRows(a.view(), c.view()), {"OrthonormalizeRows", ": q:"}},
      {backend_->ColumnSquaredNorms(a.view(), absl::MakeSpan(three)), {"ColumnSquaredNorms", "out"}},
      {backend_->AddDiagonal(1, a.view()), {"AddDiagonal", "a"}},
      {backend_->Symmetrize(a.view()), {"Symmetrize", "a"}},
      {backend_->PackLower(c.view(), a.view()), {"PackLower", "packed", "expected [1, 10], got [3, 4]"}},
      {backend_->UnpackLower(a.view(), c.view()), {"UnpackLower", "packed", "expected [1, 10], got [3, 4]"}},
      {backend_->UnpackLower(a.view(), b.view()), {"UnpackLower", ": x:"}},
      {backend_->PackRow(b.view(), 0, a.view()), {"PackRow", "x", "expected [1, 4], got [3, 4]"}},
      {backend_->PackRow(a.view().RowRange(0, 1), 0, b.view()), {"PackRow", "packed", "expected [1, 10], got [3, 4]"}},
      {backend_->PackRow(one.view(), 1, one.view()), {"PackRow", "expected a row in [0, 1), got 1"}},
      {backend_->Dot(a.view(), c.view()).status(), {"Dot", "y"}},
      {backend_->RowSquaredNorms(a.view(), absl::MakeSpan(four)), {"RowSquaredNorms", "out"}},
      {backend_->Diagonal(c.view(), absl::MakeSpan(three)), {"Diagonal", "out"}},
      {backend_->SpdInverse(c.view(), a.view()), {"SpdInverse", "x"}},
      {backend_->SymmetricEigen(c.view(), absl::MakeSpan(three), c.view()), {"SymmetricEigen", "values"}},
      {backend_->DensePrecondition(c.view(), c.view(), a.view(), b.view()), {"DensePrecondition", ": l:"}},
      {backend_->LowRankPrecondition({1, v.view(), c.view()}, {}, a.view(), b.view()), {"LowRankPrecondition", "core"}},
  };
  for (const auto& [status, parts] : cases) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    for (const std::string& part : parts) EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST_F(BackendConformanceTest, GivesTheSameBitsAgainAndFromManyThreads) {
  constexpr int64_t kRows = 130, kCols = 257, kRank = 24;
  const Dense d = Uniform(kRows, kCols, 21), v = Uniform(kRank, kCols, 22), w = Uniform(kRank, kRows, 23);
  const Dense s = SpdMatrix(kRank, 10, 24), big = SpdMatrix(kRows, 1e3, 25);
  Guarded dd = Put(d), dv = Put(v), dw = Put(w), ds = Put(s), dbig = Put(big);
  // The low-rank product, an inverse and an eigendecomposition, one below the other.
  const auto run = [&](std::vector<float>& out) {
    DeviceMatrix u = backend_->Allocate(kRows, kCols).value(), x = backend_->Allocate(kRows, kRows).value(),
                 q = backend_->Allocate(kRows, kRows).value();
    std::vector<double> values(kRows);
    ASSERT_TRUE(
        backend_->LowRankPrecondition({1.5, dw.view(), ds.view()}, {1.0, dv.view(), ds.view()}, dd.view(), u.view())
            .ok());
    ASSERT_TRUE(backend_->SpdInverse(dbig.view(), x.view()).ok());
    ASSERT_TRUE(backend_->SymmetricEigen(dbig.view(), absl::MakeSpan(values), q.view()).ok());
    out.assign(kRows * (kCols + 2 * kRows), 0.0f);
    ASSERT_TRUE(backend_->Download(u.view(), MatrixView(out.data(), kRows, kCols)).ok());
    ASSERT_TRUE(backend_->Download(x.view(), MatrixView(out.data() + kRows * kCols, kRows, kRows)).ok());
    ASSERT_TRUE(backend_->Download(q.view(), MatrixView(out.data() + kRows * (kCols + kRows), kRows, kRows)).ok());
  };
  std::vector<std::vector<float>> results(8);
  run(results[0]);
  run(results[1]);
  std::vector<std::thread> threads;
  for (size_t i = 2; i < results.size(); ++i) threads.emplace_back([&, i] { run(results[i]); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) {
    ASSERT_EQ(result.size(), results[0].size());
    EXPECT_EQ(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace precondor
