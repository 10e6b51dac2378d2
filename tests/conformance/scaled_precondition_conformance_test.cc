// SPDX-License-Identifier: Apache-2.0
// LowRankPrecondition with a length rule, and the cores that it takes, by the backend's own form and by the default
// one, against naive f64.
#include <cmath>
#include <gtest/gtest.h>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/random_dense.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using reference::Dense;
using reference::Product;
using reference::Transposed;

DeviceMatrix Put(Backend& backend, const Dense& x) {
  const std::vector<float> host(x.data.begin(), x.data.end());
  DeviceMatrix device = backend.Allocate(x.rows, x.cols).value();
  EXPECT_TRUE(backend.Upload(ConstMatrixView(host.data(), x.rows, x.cols), device.view()).ok());
  return device;
}

// A side J = c (I - P'SP), S = s (I + s P P' s)^-1 s: the inverse of I + P' s^2 P times c.
struct Side {
  Side(Backend& backend, double c, int64_t count, int64_t d, double largest_root, uint64_t seed)
      : vectors(RandomDense(count, d, seed)), j(reference::Identity(d)) {
    for (double& element : vectors.data) element /= std::sqrt(static_cast<double>(d));
    Dense scaled(count, d), core(count, count);
    for (int64_t i = 0; i < count; ++i) {
      roots.push_back(i % 5 == 3 ? 0.0
                                 : largest_root / static_cast<double>(i + 1));  // some rows have lost their weight
      for (int64_t k = 0; k < d; ++k) scaled.at(i, k) = roots[i] * vectors.at(i, k);
    }
    if (count > 0) {
      const Dense identity = reference::Identity(count), gram = Product(scaled, Transposed(scaled));
      core = reference::SpdInverse(reference::Combination(1, identity, 1, gram));
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t k = 0; k < count; ++k) core.at(i, k) *= roots[i] * roots[k];
      }
      j = reference::Combination(1, j, -1, Product(Transposed(vectors), Product(core, vectors)));
    }
    j = reference::Combination(c, j, 0, j);
    device_vectors = Put(backend, vectors);
    device_core = Put(backend, core);
    form = {c, device_vectors.view(), device_core.view(), roots};
  }
  Dense vectors, j;
  std::vector<double> roots;
  DeviceMatrix device_vectors, device_core;
  LowRankInverse form;
};

class ScaledPreconditionTest : public testing::TestWithParam<bool> {
 protected:
  ScaledPreconditionTest()
      : forwarding_(*device_), backend_(GetParam() ? *device_ : static_cast<Backend&>(forwarding_)) {}

  // f32 has 6e-8; the products here are at most 200 long, and what is taken from D is at most as large.
  static constexpr double kTolerance = 2e-5;

  const std::unique_ptr<Backend> device_ = MakeTestBackend();
  FaultyBackend forwarding_;
  Backend& backend_;
};

TEST_P(ScaledPreconditionTest, TheRuleSeesBothLengthsAndItsFactorIsInTheAnswer) {
  const int64_t sizes[][4] = {{40, 70, 8, 16}, {70, 40, 16, 8}, {64, 64, 24, 24}, {33, 65, 0, 4},   {65, 33, 0, 5},
                              {33, 65, 7, 0},  {65, 33, 6, 0},  {12, 5, 0, 0},    {150, 20, 9, 12}, {1, 1, 1, 1}};
  for (const auto& [m, n, p, q] : sizes) {
    for (const bool with_roots : {true, false}) {
      Side out(backend_, 0.5, p, m, 3.0, 1), in(backend_, 0.25, q, n, 2.0, 2);
      if (!with_roots) out.form.roots = in.form.roots = {};
      const Dense d = RandomDense(m, n, 3), expected = Product(Product(out.j, d), in.j);
      const DeviceMatrix device_d = Put(backend_, d);
      DeviceMatrix u = Put(backend_, Dense(m, n, NAN));
      double d_length = 0, u_length = 0;
      const auto rule = [&](double d_given, double u_given) {
        d_length = d_given;
        u_length = u_given;
        return absl::StatusOr<double>(1.5 * d_given / u_given);
      };
      ASSERT_TRUE(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view()).ok());
      const double length = FrobeniusNorm(expected), factor = 1.5 * FrobeniusNorm(d) / length;
      EXPECT_NEAR(d_length / FrobeniusNorm(d), 1, 1e-6);
      EXPECT_NEAR(u_length / length, 1, 1e-4) << m << "x" << n << ", " << p << ", " << q;
      std::vector<float> got(m * n);
      ASSERT_TRUE(backend_.Download(u.view(), MatrixView(got.data(), m, n)).ok());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i] / factor, expected.data[i], kTolerance * FrobeniusNorm(d)) << m << "x" << n;
      }
    }
  }
}

// D in the span of both sides' strongest vectors: little is left of it, and a sum that subtracts would not know how
// much.
TEST_P(ScaledPreconditionTest, KnowsTheLengthOfWhatIsNearlyGone) {
  const int64_t m = 48, n = 80;
  for (const double root : {10.0, 30.0, 100.0}) {
    const Side out(backend_, 1.0, 4, m, root, 1), in(backend_, 1.0, 6, n, root, 2);
    Dense d(m, n);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) d.at(i, j) = out.vectors.at(0, i) * in.vectors.at(0, j);
    }
    const Dense expected = Product(Product(out.j, d), in.j);
    ASSERT_LT(FrobeniusNorm(expected), 0.01 * FrobeniusNorm(d));
    const DeviceMatrix device_d = Put(backend_, d);
    DeviceMatrix u = backend_.Allocate(m, n).value();
    double u_length = 0;
    const auto rule = [&](double, double given) {
      u_length = given;
      return absl::StatusOr<double>(1.0);
    };
    ASSERT_TRUE(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view()).ok());
    std::vector<float> got(m * n);
    ASSERT_TRUE(backend_.Download(u.view(), MatrixView(got.data(), m, n)).ok());
    double square = 0;
    for (const double element : got) square += element * element;
    EXPECT_NEAR(u_length / std::sqrt(square), 1, 1e-6) << "the length of what is there, rounding included";
  }
}

TEST_P(ScaledPreconditionTest, FactorsBeyondF32AreNoneOfItsAnswers) {
  const Side out(backend_, 1e-30, 2, 8, 1.0, 1), in(backend_, 1e-5, 2, 6, 1.0, 2);
  const Dense d = RandomDense(8, 6, 3), expected = Product(Product(out.j, d), in.j);
  const DeviceMatrix device_d = Put(backend_, d);
  DeviceMatrix u = backend_.Allocate(8, 6).value();
  for (const double factor : {1e40, 0.0}) {
    const auto rule = [&](double, double) { return absl::StatusOr<double>(factor); };
    ASSERT_TRUE(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view()).ok());
    std::vector<float> got(8 * 6);
    ASSERT_TRUE(backend_.Download(u.view(), MatrixView(got.data(), 8, 6)).ok());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], factor * expected.data[i], 1e-4 * 1e5);
  }
}

TEST_P(ScaledPreconditionTest, PassesTheRulesErrorsOn) {
  const Side out(backend_, 1.0, 3, 9, 1.0, 1), in(backend_, 1.0, 2, 7, 1.0, 2);
  DeviceMatrix u = backend_.Allocate(9, 7).value();
  for (const double element : {1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Dense d = RandomDense(9, 7, 3);
    d.at(4, 4) = element;
    const DeviceMatrix device_d = Put(backend_, d);
    double seen = 0;
    const auto rule = [&](double d_length, double) -> absl::StatusOr<double> {
      seen = d_length;
      return absl::InvalidArgumentError("no");
    };
    EXPECT_EQ(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view()),
              absl::InvalidArgumentError("no"));
    EXPECT_EQ(std::isfinite(seen), std::isfinite(element));
  }
}

TEST_P(ScaledPreconditionTest, CoresAreTheirDefinition) {
  for (const int64_t n : {1, 2, 17, 64, 129, 260}) {  // the last is beyond what CUDA fuses
    const Dense rows = RandomDense(n, n + 3, 7);
    Dense gram = Product(rows, Transposed(rows)), packed(1, n * (n + 1) / 2), damped(n, n);
    gram = reference::Combination(1 / static_cast<double>(n), gram, 0, gram);
    std::vector<double> roots(n);
    for (int64_t i = 0; i < n; ++i) {
      roots[i] = i % 5 == 4 ? 0.0 : .5 + .1 * static_cast<double>(i % 7);  // a row without weight has none in the core
      for (int64_t j = 0; j <= i; ++j) packed.at(0, i * (i + 1) / 2 + j) = gram.at(i, j);
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) damped.at(i, j) = roots[i] * gram.at(i, j) * roots[j] + (i == j ? 1.0 : 0.0);
    }
    Dense expected = reference::SpdInverse(damped);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) expected.at(i, j) *= roots[i] * roots[j];
    }
    const DeviceMatrix device_gram = Put(backend_, packed);
    DeviceMatrix core = Put(backend_, Dense(n, n, NAN));
    ASSERT_TRUE(backend_.LowRankCore(roots, device_gram.view(), core.view()).ok()) << n;
    std::vector<float> got(n * n);
    ASSERT_TRUE(backend_.Download(core.view(), MatrixView(got.data(), n, n)).ok());
    // I + s G s may be rounded to f32; its eigenvalues are 1 or more, so that its inverse is as far off.
    const double tolerance = 4 * 6e-8 * reference::FrobeniusNorm(damped);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        ASSERT_NEAR(got[i * n + j], expected.at(i, j), tolerance) << n << ": " << i << ", " << j;
        ASSERT_EQ(got[i * n + j], got[j * n + i]);
      }
    }
  }
}

TEST_P(ScaledPreconditionTest, RefusesCoresThatAreNone) {
  const std::vector<double> root = {1.0};
  DeviceMatrix core = Put(backend_, Dense(1, 1));
  for (const double bad : {-2.0, static_cast<double>(NAN)}) {
    const DeviceMatrix gram = Put(backend_, Dense(1, 1, bad));
    EXPECT_TRUE(absl::IsFailedPrecondition(backend_.LowRankCore(root, gram.view(), core.view()))) << bad;
  }
  const absl::Status shape = backend_.LowRankCore({1.0, 2.0}, core.view(), core.view());
  EXPECT_TRUE(absl::IsInvalidArgument(shape)) << shape;
  EXPECT_NE(shape.message().find("LowRankCore: gram: expected [1, 3], got [1, 1]"), std::string::npos) << shape;
}

INSTANTIATE_TEST_SUITE_P(Forms, ScaledPreconditionTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "Cpu" : "Default"; });

}  // namespace
}  // namespace precondor
