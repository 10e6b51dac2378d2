// SPDX-License-Identifier: Apache-2.0
// DensePrecondition and NewtonSchulz with products of numbers rounded to bf16 or TF32 against naive f64.
#include <algorithm>
#include <array>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <utility>
#include <vector>

#include "tests/reference/muon.h"
#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/random_dense.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using reference::Dense;

Dense Symmetric(int64_t n, uint64_t seed) {
  const Dense x = RandomDense(n, n, seed);
  return reference::Combination(0.5, x, 0.5, reference::Transposed(x));
}

// x in a matrix of guards: from column `lead` on, so that rows may begin anywhere, and 3 more behind each row.
class InGuards {
 public:
  InGuards(Backend& backend, const Dense& x, int64_t lead)
      : backend_(backend), lead_(lead), rows_(x.rows), cols_(x.cols), width_(lead + x.cols + 3) {
    std::vector<float> host(rows_ * width_, kGuard);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) host[i * width_ + lead_ + j] = static_cast<float>(x.at(i, j));
    }
    device_ = backend.Allocate(rows_, width_).value();
    EXPECT_TRUE(backend.Upload(ConstMatrixView(host.data(), rows_, width_), device_.view()).ok());
  }
  MatrixView view() { return MatrixView(device_.view().data + lead_, rows_, cols_, width_); }

  Dense Read() const {
    std::vector<float> host(rows_ * width_);
    EXPECT_TRUE(backend_.Download(device_.view(), MatrixView(host.data(), rows_, width_)).ok());
    Dense x(rows_, cols_);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < width_; ++j) {
        const float value = host[i * width_ + j];
        if (j < lead_ || j >= lead_ + cols_) {
          EXPECT_EQ(value, kGuard) << "beyond a row";
        } else {
          x.at(i, j - lead_) = value;
        }
      }
    }
    return x;
  }

 private:
  static constexpr float kGuard = 1e30f;
  Backend& backend_;
  const int64_t lead_, rows_, cols_, width_;
  DeviceMatrix device_;
};

// Rounding changes each element of what is rounded by 2^-9 or 2^-10 of it at most, so that no norm changes by more, and
// |l d r| <= |l| |d| |r| in Frobenius' norm: five or four times that, and a little for f32's sums.
struct Rounding {
  const char* name;
  ProductPrecision precision;
  double bound, usual;  // of |l| |d| |r|; of |l d r|, as roundings are independent
};

class RoundedProductsConformanceTest : public testing::TestWithParam<Rounding> {
 protected:
  void SetUp() override {
    if (!backend_->SupportsPrecision(GetParam().precision)) GTEST_SKIP() << "bf16 is CUDA's alone";
  }
  Backend& backend() { return *backend_; }

 private:
  const std::unique_ptr<Backend> backend_ = MakeTestBackend();
};

TEST_P(RoundedProductsConformanceTest, ADensePreconditionIsOffByItsRoundingAlone) {
  const Rounding& rounding = GetParam();
  for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 70}, {70, 3}, {33, 65}, {64, 64}, {31, 64}, {130, 200}, {257, 129}, {96, 1100}}) {
    const Dense l = Symmetric(m, 1), r = Symmetric(n, 2), d = RandomDense(m, n, 3);
    const Dense expected = reference::Product(reference::Product(l, d), r);
    for (const int64_t lead : {0, 1}) {
      SCOPED_TRACE(testing::Message() << m << " x " << n << " behind " << lead);
      InGuards of_l(backend(), l, lead), of_r(backend(), r, lead), of_d(backend(), d, lead);
      InGuards of_u(backend(), Dense(m, n, NAN), lead);
      ASSERT_TRUE(
          backend().DensePrecondition(of_l.view(), of_r.view(), of_d.view(), of_u.view(), rounding.precision).ok());
      const double off = FrobeniusNorm(reference::Combination(1, of_u.Read(), -1, expected));
      EXPECT_LE(off, rounding.bound * FrobeniusNorm(l) * FrobeniusNorm(d) * FrobeniusNorm(r));
      EXPECT_LE(off, rounding.usual * FrobeniusNorm(expected));
      for (const InGuards* input : {&of_l, &of_r, &of_d}) input->Read();
    }
  }
}

// The path is taken where there is one: F32's answer would be nearer. Elsewhere it is F32's to the bit.
TEST(RoundedProducts, Tf32IsCudasAlone) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  constexpr int64_t kRows = 33, kCols = 66;
  const Dense l = Symmetric(kRows, 1), r = Symmetric(kCols, 2), d = RandomDense(kRows, kCols, 3);
  InGuards of_l(*backend, l, 0), of_r(*backend, r, 0), of_d(*backend, d, 0), u(*backend, Dense(kRows, kCols, NAN), 0);
  const auto answer = [&](ProductPrecision precision) {
    EXPECT_TRUE(backend->DensePrecondition(of_l.view(), of_r.view(), of_d.view(), u.view(), precision).ok());
    return u.Read();
  };
  const Dense exact = answer(ProductPrecision::kF32), rounded = answer(ProductPrecision::kTf32);
  if (backend->name() == "cuda") {
    EXPECT_GE(FrobeniusNorm(reference::Combination(1, rounded, -1, exact)), 1e-4 * FrobeniusNorm(exact));
  } else {
    EXPECT_EQ(rounded.data, exact.data);
  }
}

// On the CPU, and for a matrix that does not begin at a multiple of 16 bytes, the product is f32's to the bit.
TEST(RoundedProducts, AProductInTf32IsOffByItsRoundingAlone) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const auto& [m, k, n] : std::vector<std::array<int64_t, 3>>{{1, 1, 1},
                                                                   {3, 70, 5},
                                                                   {70, 3, 9},
                                                                   {33, 65, 17},
                                                                   {64, 64, 64},
                                                                   {130, 31, 200},
                                                                   {257, 129, 2},
                                                                   {256, 128, 192}}) {
    for (const int transposes : {0, 1, 2, 3}) {
      const bool ta = transposes % 2 == 1, tb = transposes / 2 == 1;
      for (const std::pair<double, double>& scales : {std::pair(1.0, 0.0), std::pair(-0.5, 0.75)}) {
        const double alpha = scales.first, beta = scales.second;  // clang 14 captures no bindings
        const Dense a = RandomDense(m, k, 1), b = RandomDense(k, n, 2), c = RandomDense(m, n, 3);
        const Dense expected = reference::Combination(alpha, reference::Product(a, b), beta, c);
        for (const int64_t lead : {0, 1}) {
          SCOPED_TRACE(testing::Message() << m << " x " << k << " x " << n << " behind " << lead);
          InGuards of_a(*backend, ta ? reference::Transposed(a) : a, lead), of_c(*backend, c, 0);
          InGuards of_b(*backend, tb ? reference::Transposed(b) : b, 0), in_f32(*backend, c, 0);
          const auto multiply = [&](InGuards& to, ProductPrecision precision) {
            EXPECT_TRUE(
                backend->Gemm(alpha, of_a.view(), Transpose(ta), of_b.view(), Transpose(tb), beta, to.view(), precision)
                    .ok());
            return to.Read();
          };
          const Dense rounded = multiply(of_c, ProductPrecision::kTf32),
                      exact = multiply(in_f32, ProductPrecision::kF32);
          const double scale = FrobeniusNorm(a) * FrobeniusNorm(b);
          EXPECT_LE(FrobeniusNorm(reference::Combination(1, rounded, -1, expected)), 2.1 / 1024 * scale);
          if (backend->name() != "cuda" || lead != 0) {
            EXPECT_EQ(rounded.data, exact.data);
          } else if (m == 256) {  // small or unaligned ones need not be rounded
            EXPECT_GE(FrobeniusNorm(reference::Combination(1, rounded, -1, exact)), 1e-5 * scale);
          }
          for (const InGuards* input : {&of_a, &of_b}) input->Read();
        }
      }
    }
  }
}

// Lengths are those of the gradient and the answer themselves, wherever copies of them went.
TEST_P(RoundedProductsConformanceTest, LengthsAreTheGradientsAndTheAnswers) {
  const Dense l = Symmetric(21, 1), r = Symmetric(34, 2), d = RandomDense(21, 34, 3);
  InGuards of_l(backend(), l, 1), of_r(backend(), r, 0), of_d(backend(), d, 2), u(backend(), Dense(21, 34, NAN), 3);
  double d_length = 0, u_length = 0;
  const auto rule = [&](double of_gradient, double of_answer) {
    d_length = of_gradient;
    u_length = of_answer;
    return absl::StatusOr<double>(0.5);
  };
  ASSERT_TRUE(
      backend().DensePrecondition(of_l.view(), of_r.view(), of_d.view(), rule, u.view(), GetParam().precision).ok());
  EXPECT_NEAR(d_length, FrobeniusNorm(d), 1e-5 * d_length);
  EXPECT_NEAR(u_length, 2 * FrobeniusNorm(u.Read()), 1e-5 * u_length);
}

INSTANTIATE_TEST_SUITE_P(All, RoundedProductsConformanceTest,
                         testing::Values(Rounding{"Bf16", ProductPrecision::kBf16, 5.1 / 512, 0.01},
                                         Rounding{"Tf32", ProductPrecision::kTf32, 4.1 / 1024, 0.003}),
                         [](const testing::TestParamInfo<Rounding>& info) { return info.param.name; });

// Tall, wide and tiny matrices, of rows that begin anywhere; the existing direction, and two kinds of momentum.
TEST(RoundedProducts, NewtonSchulzIsOffByItsRoundingAlone) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 70}, {70, 3}, {33, 65}, {64, 64}, {31, 64}, {130, 200}, {257, 129}}) {
    for (const int kind : {0, 1, 2}) {
      const Dense d = RandomDense(m, n, 3), before = RandomDense(m, n, 4), nothing(m, n, NAN);
      reference::Muon oracle({.beta = kind == 0 ? 0 : 0.9, .nesterov = kind == 2, .iterations = 3}, m, n);
      if (kind != 0) oracle.Step(before);
      const Dense expected = oracle.Step(d);
      for (const auto& [precision, bound] : {std::pair(ProductPrecision::kF32, 1e-5),
                                             {ProductPrecision::kTf32, 1e-2},
                                             {ProductPrecision::kBf16, 4e-2}}) {
        SCOPED_TRACE(testing::Message() << m << " x " << n << ", precision " << static_cast<int>(precision) << ", "
                                        << kind);
        InGuards of_d(*backend, d, kind), of_before(*backend, before, 1), next(*backend, nothing, 2);
        InGuards lookahead(*backend, nothing, 3), u(*backend, nothing, 1);
        std::array<double, 3> squares = {};
        operation::NewtonSchulz step;
        step.d = of_d.view();
        step.steps = 3;
        step.epsilon = 1e-7;
        if (kind != 0) {
          step.momentum = of_before.view();
          step.beta = 0.9;
          step.next = next.view();
        }
        if (kind == 2) step.lookahead = lookahead.view();
        step.scale = 0.2 * std::sqrt(static_cast<double>(std::max(m, n)));
        step.u = u.view();
        step.precision = precision;
        step.squares = absl::MakeSpan(squares);
        ASSERT_TRUE(backend->NewtonSchulz(step).ok());
        const Dense& direction = oracle.direction();
        const Dense answer = u.Read();
        EXPECT_LE(FrobeniusNorm(reference::Combination(1, answer, -1, expected)), bound * FrobeniusNorm(expected));
        EXPECT_NEAR(std::sqrt(squares[0]), FrobeniusNorm(d), 1e-5 * FrobeniusNorm(d));
        EXPECT_NEAR(std::sqrt(squares[1]), FrobeniusNorm(direction), 1e-5 * FrobeniusNorm(direction));
        EXPECT_NEAR(std::sqrt(squares[2]), FrobeniusNorm(answer), 1e-5 * FrobeniusNorm(answer));
        if (kind == 2) {
          EXPECT_LE(FrobeniusNorm(reference::Combination(1, lookahead.Read(), -1, direction)),
                    1e-6 * FrobeniusNorm(direction));
        }
        for (const InGuards* input : {&of_d, &of_before, &next}) input->Read();
      }
    }
  }
}

// Gradients of trained models have singular values over many powers of ten, and fewer of them than rows. The bound is
// that of products with x x', which rounds them by 6e-8 of the largest one's square.
TEST(RoundedProducts, NewtonSchulzOfFallingSingularValues) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{{24, 96}, {96, 24}, {40, 40}, {30, 60}}) {
    for (const double fall : {0.5, 0.9}) {
      SCOPED_TRACE(testing::Message() << m << " x " << n << ", each " << fall << " of the one before");
      const int64_t k = std::min(m, n);
      Dense left = RandomDense(m, k, 3);
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < k; ++j) left.at(i, j) *= j >= k - 4 ? 0 : std::pow(fall, static_cast<double>(j));
      }
      const Dense d = reference::Product(left, RandomDense(k, n, 4));
      const Dense expected = reference::Muon({.beta = 0}, m, n).Step(d);
      InGuards of_d(*backend, d, 0), u(*backend, Dense(m, n, NAN), 1);
      std::array<double, 3> squares = {};
      const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(m, n)));
      ASSERT_TRUE(backend
                      ->NewtonSchulz({.d = of_d.view(),
                                      .steps = 5,
                                      .epsilon = 1e-7,
                                      .scale = scale,
                                      .u = u.view(),
                                      .squares = absl::MakeSpan(squares)})
                      .ok());
      const Dense difference = reference::Combination(1, u.Read(), -1, expected);
      EXPECT_LE(FrobeniusNorm(difference), 1e-3 * FrobeniusNorm(expected));
    }
  }
}

TEST(RoundedProducts, NewtonSchulzChecksShapes) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  DeviceMatrix d = backend->Allocate(2, 3).value(), u = backend->Allocate(2, 3).value(),
               other = backend->Allocate(3, 2).value();
  std::array<double, 3> squares = {-1, -1, -1};
  operation::NewtonSchulz step{.d = d.view(), .steps = 2, .u = u.view(), .squares = absl::MakeSpan(squares)};
  EXPECT_TRUE(backend->NewtonSchulz(step).ok());
  EXPECT_EQ(squares, (std::array<double, 3>{0, 0, 0})) << "of a matrix of zeros";
  step.u = other.view();
  EXPECT_EQ(backend->NewtonSchulz(step).code(), absl::StatusCode::kInvalidArgument);
  step.u = u.view();
  step.momentum = d.view();
  const absl::Status without_next = backend->NewtonSchulz(step);
  EXPECT_EQ(without_next.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(without_next.message().find("next: expected [2, 3]"), absl::string_view::npos) << without_next;
  step.momentum = {};
  step.next = other.view();
  EXPECT_EQ(backend->NewtonSchulz(step).code(), absl::StatusCode::kInvalidArgument) << "without a momentum";
}

TEST(RoundedProducts, NewtonSchulzShowsADirectionThatIsNotFinite) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  DeviceMatrix d = backend->Allocate(3, 3).value(), u = backend->Allocate(3, 3).value();
  ASSERT_TRUE(backend->AddDiagonal(std::numeric_limits<double>::infinity(), d.view()).ok());
  std::array<double, 3> squares = {};
  ASSERT_TRUE(
      backend->NewtonSchulz({.d = d.view(), .steps = 2, .u = u.view(), .squares = absl::MakeSpan(squares)}).ok());
  EXPECT_FALSE(std::isfinite(squares[1])) << "as that of a momentum that is repeated";
}

TEST(RoundedProducts, ABackendWithoutBf16SaysSo) {
  const std::unique_ptr<Backend> inner = MakeTestBackend();
  FaultyBackend backend(*inner);  // has the defaults
  EXPECT_FALSE(backend.SupportsPrecision(ProductPrecision::kBf16));
  EXPECT_TRUE(backend.SupportsPrecision(ProductPrecision::kTf32));
  DeviceMatrix l = backend.Allocate(2, 2).value(), d = backend.Allocate(2, 2).value(),
               u = backend.Allocate(2, 2).value();
  const absl::Status status =
      backend.DensePrecondition(l.view(), l.view(), d.view(), u.view(), ProductPrecision::kBf16);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("expected F32"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace precondor
