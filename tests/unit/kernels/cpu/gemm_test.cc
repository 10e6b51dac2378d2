// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <gtest/gtest.h>
#include <iterator>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

namespace precondor::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Uniform(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(engine);
  return values;
}

// A matrix whose rows lie `kGap` elements apart, each gap filled with NaN.
struct Padded {
  static constexpr int64_t kGap = 3;
  Padded(int64_t rows, int64_t cols, uint32_t seed)
      : elements(rows * (cols + kGap), kNan), view(elements.data(), rows, cols, cols + kGap) {
    const std::vector<float> values = Uniform(rows * cols, seed);
    for (int64_t i = 0; i < rows; ++i) std::copy_n(values.data() + i * cols, cols, view.row(i));
  }
  std::vector<float> elements;
  MatrixView view;
};

double Element(ConstMatrixView x, Transpose transpose, int64_t i, int64_t j) {
  return transpose == Transpose::kYes ? x.at(j, i) : x.at(i, j);
}

// One shape of every class of the table, around its bounds.
using Shape = std::tuple<int64_t, int64_t, int64_t>;  // m, n, inner
class GemmTest : public testing::TestWithParam<std::tuple<Shape, bool, bool>> {};

// Each element sums `inner` products of numbers below 1: f32's error is at most (inner + 2) eps (|alpha| inner +
// |beta|).
TEST_P(GemmTest, BothLibrariesAndTheChoiceMatchTheDefinition) {
  const auto [shape, ta, tb] = GetParam();
  const auto [m, n, inner] = shape;
  const Transpose transpose_a = static_cast<Transpose>(ta), transpose_b = static_cast<Transpose>(tb);
  const Padded a(ta ? inner : m, ta ? m : inner, 1), b(tb ? n : inner, tb ? inner : n, 2);
  const auto multiply = [&](int way, double alpha, double beta, MatrixView c) {
    if (way == 2) {
      Gemm(alpha, a.view, transpose_a, b.view, transpose_b, beta, c);
      return true;
    }
    return GemmBy(static_cast<GemmLibrary>(way), alpha, a.view, transpose_a, b.view, transpose_b, beta, c);
  };
  for (const auto& [alpha, beta] : {std::pair(1.0, 0.0), std::pair(-0.5, 1.0), std::pair(2.0, -0.25)}) {
    for (int way = 0; way < 3; ++way) {
      const Padded before(m, n, 3);
      Padded c(m, n, 3);
      if (beta == 0) {
        for (int64_t i = 0; i < m; ++i) std::fill_n(c.view.row(i), n, kNan);
      }
      if (!multiply(way, alpha, beta, c.view)) {
        ASSERT_EQ(way, static_cast<int>(GemmLibrary::kOneDnn));
        continue;
      }
      const double bound =
          static_cast<double>(inner + 2) * 6e-8 * (std::fabs(alpha) * static_cast<double>(inner) + std::fabs(beta));
      for (int64_t i = 0; i < m; i += 1 + m / 40) {
        for (int64_t j = 0; j < n; j += 1 + n / 40) {
          double expected = beta == 0 ? 0.0 : beta * before.view.at(i, j);
          for (int64_t l = 0; l < inner; ++l) {
            expected += alpha * Element(a.view, transpose_a, i, l) * Element(b.view, transpose_b, l, j);
          }
          ASSERT_NEAR(c.view.at(i, j), expected, bound) << "way " << way << " at " << i << ", " << j;
        }
      }
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = n; j < n + Padded::kGap; ++j) ASSERT_TRUE(std::isnan(c.view.row(i)[j])) << "beyond a row";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GemmTest,
                         testing::Combine(testing::Values(Shape{3, 5, 7}, Shape{1, 200, 130}, Shape{200, 1, 130},
                                                          Shape{1, 1, 9}, Shape{64, 65, 64}, Shape{128, 128, 129},
                                                          Shape{16, 300, 200}, Shape{300, 16, 200}, Shape{130, 131, 16},
                                                          Shape{129, 130, 257}),
                                          testing::Bool(), testing::Bool()));

// x x' and x' x for x with rows that lie apart; sizes around the blocks' bounds. Only the lower triangle of c is read.
TEST(SymmetricGemmTest, MatchesTheDefinitionAndIsSymmetricToTheBit) {
  for (const int64_t n : {65, 130, 257, 1100}) {
    for (const bool ta : {false, true}) {
      for (const double beta : {0.0, 0.5}) {
        const int64_t inner = 33;
        const Padded x(ta ? inner : n, ta ? n : inner, 1);
        Padded c(n, n, 2);
        const Padded before(n, n, 2);
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = i + 1; j < n; ++j) c.view.at(i, j) = kNan;
        }
        SymmetricGemm(2.0, x.view, Transpose(ta), x.view, Transpose(!ta), beta, c.view);
        const double bound = static_cast<double>(inner + 2) * 6e-8 * (2.0 * inner + beta);
        for (int64_t i = 0; i < n; i += 1 + n / 40) {
          for (int64_t j = 0; j <= i; j += 1 + n / 40) {
            double expected = beta * before.view.at(i, j);
            for (int64_t l = 0; l < inner; ++l) {
              expected += 2.0 * Element(x.view, Transpose(ta), i, l) * Element(x.view, Transpose(ta), j, l);
            }
            ASSERT_NEAR(c.view.at(i, j), expected, bound) << n << " at " << i << ", " << j;
          }
        }
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < i; ++j) ASSERT_EQ(c.view.at(i, j), c.view.at(j, i)) << n;
          for (int64_t j = n; j < n + Padded::kGap; ++j) ASSERT_TRUE(std::isnan(c.view.row(i)[j])) << "beyond a row";
        }
      }
    }
  }
}

int64_t Threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator());
}

TEST(GemmThreadsTest, OneDnnStaysInItsCallersThread) {
  const int64_t before = Threads(), d = 300;
  const Padded a(d, d, 1), b(d, d, 2);
  Padded c(d, d, 3);
  if (!GemmBy(GemmLibrary::kOneDnn, 1, a.view, Transpose::kNo, b.view, Transpose::kNo, 0, c.view)) {
    GTEST_SKIP() << "this build or processor has no use for oneDNN";
  }
  EXPECT_EQ(Threads(), before);
}

}  // namespace
}  // namespace precondor::cpu
