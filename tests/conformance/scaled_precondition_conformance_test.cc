// SPDX-License-Identifier: Apache-2.0
// LowRankPrecondition with a length rule, the cores that it takes and the columns' joining, by the backend's own form
// and by the default one, against naive f64.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <string>
#include <tuple>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/device_dense.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/random_dense.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using reference::Dense;
using reference::Product;
using reference::Transposed;

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
    device_vectors = OnDevice(backend, vectors);
    device_core = OnDevice(backend, core);
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
  const int64_t sizes[][4] = {{40, 70, 8, 16},  {70, 40, 16, 8}, {64, 64, 24, 24}, {33, 65, 0, 4},   {65, 33, 0, 5},
                              {33, 65, 7, 0},   {65, 33, 6, 0},  {12, 5, 0, 0},    {150, 20, 9, 12}, {1, 1, 1, 1},
                              {30, 300, 5, 70}, {280, 40, 9, 3}};  // of inner sizes that go in parts
  for (const auto& [m, n, p, q] : sizes) {
    for (const bool with_roots : {true, false}) {
      Side out(backend_, 0.5, p, m, 3.0, 1), in(backend_, 0.25, q, n, 2.0, 2);
      if (!with_roots) out.form.roots = in.form.roots = {};
      const Dense d = RandomDense(m, n, 3), expected = Product(Product(out.j, d), in.j);
      const DeviceMatrix device_d = OnDevice(backend_, d);
      DeviceMatrix u = OnDevice(backend_, Dense(m, n, NAN));
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
      const Dense got = OnHost(backend_, u.view());
      for (size_t i = 0; i < got.data.size(); ++i) {
        EXPECT_NEAR(got.data[i] / factor, expected.data[i], kTolerance * FrobeniusNorm(d)) << m << "x" << n;
      }
    }
  }
}

// Each of the factors of V, W, X, Y, K, what K takes away and u is off by 2^-9 of it at most, or in TF32 by 2^-10; with
// unit vectors nothing on the way is much longer than D.
TEST_P(ScaledPreconditionTest, PrecisionsAreOffByTheirRoundingAlone) {
  const int64_t sizes[][4] = {{40, 70, 8, 16}, {70, 40, 16, 8}, {33, 65, 0, 4},   {65, 33, 7, 0},
                              {12, 5, 0, 0},   {1, 1, 1, 1},    {30, 300, 5, 70}, {300, 31, 40, 5},
                              {1, 40, 1, 33},  {41, 1, 2, 1},   {3, 2, 1, 1},     {370, 361, 20, 40}};
  for (const auto& [m, n, p, q] : sizes) {
    const Side out(backend_, 0.5, p, m, 3.0, 1), in(backend_, 0.25, q, n, 2.0, 2);
    const Dense d = RandomDense(m, n, 3), expected = Product(Product(out.j, d), in.j);
    const DeviceMatrix device_d = OnDevice(backend_, d);
    for (const auto& [precision, tolerance] : {std::pair(ProductPrecision::kBf16, 0x1p-6),
                                               {ProductPrecision::kTf32, 0x1p-7},
                                               {ProductPrecision::kF32, 1e-6}}) {
      DeviceMatrix u = OnDevice(backend_, Dense(m, n, NAN));
      double u_length = 0;
      const auto rule = [&](double, double given) {
        u_length = given;
        return absl::StatusOr<double>(1.0);
      };
      ASSERT_TRUE(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view(), precision).ok());
      const Dense got = OnHost(backend_, u.view());
      const double off = Distance(got, expected);
      EXPECT_LE(off, tolerance * 0.125 * FrobeniusNorm(d)) << m << "x" << n << ", " << p << ", " << q;
      EXPECT_NEAR(u_length / FrobeniusNorm(got), 1, 1e-5);
      // Small products of TF32 are f32's.
      const bool rounds =
          precision == ProductPrecision::kBf16 ? p + q > 8 : precision == ProductPrecision::kTf32 && m > 300;
      if (rounds && backend_.name() == "cuda" && GetParam()) {
        EXPECT_GT(off, 1e-6 * FrobeniusNorm(d)) << "of f32, where it is not asked for";
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
    const DeviceMatrix device_d = OnDevice(backend_, d);
    DeviceMatrix u = backend_.Allocate(m, n).value();
    double u_length = 0;
    const auto rule = [&](double, double given) {
      u_length = given;
      return absl::StatusOr<double>(1.0);
    };
    ASSERT_TRUE(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view()).ok());
    EXPECT_NEAR(u_length / FrobeniusNorm(OnHost(backend_, u.view())), 1, 1e-6)
        << "the length of the answer in memory, rounding included";
  }
}

TEST_P(ScaledPreconditionTest, FactorsBeyondF32AreNoneOfItsAnswers) {
  const Side out(backend_, 1e-30, 2, 8, 1.0, 1), in(backend_, 1e-5, 2, 6, 1.0, 2);
  const Dense d = RandomDense(8, 6, 3), expected = Product(Product(out.j, d), in.j);
  const DeviceMatrix device_d = OnDevice(backend_, d);
  DeviceMatrix u = backend_.Allocate(8, 6).value();
  for (const double factor : {1e40, 0.0}) {
    const auto rule = [&](double, double) { return absl::StatusOr<double>(factor); };
    ASSERT_TRUE(backend_.LowRankPrecondition(out.form, in.form, device_d.view(), rule, u.view()).ok());
    const Dense got = OnHost(backend_, u.view());
    for (size_t i = 0; i < got.data.size(); ++i) EXPECT_NEAR(got.data[i], factor * expected.data[i], 1e-4 * 1e5);
  }
}

TEST_P(ScaledPreconditionTest, PassesTheRulesErrorsOn) {
  const Side out(backend_, 1.0, 3, 9, 1.0, 1), in(backend_, 1.0, 2, 7, 1.0, 2);
  DeviceMatrix u = backend_.Allocate(9, 7).value();
  for (const double element : {1.0, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Dense d = RandomDense(9, 7, 3);
    d.at(4, 4) = element;
    const DeviceMatrix device_d = OnDevice(backend_, d);
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
    const DeviceMatrix device_gram = OnDevice(backend_, packed);
    DeviceMatrix core = OnDevice(backend_, Dense(n, n, NAN));
    DeviceMatrix kept = OnDevice(backend_, Dense(1, n * (n + 1) / 2, NAN));
    ASSERT_TRUE(backend_.LowRankCore(roots, device_gram.view(), core.view(), kept.view()).ok()) << n;
    const Dense got = OnHost(backend_, core.view()), half = OnHost(backend_, kept.view());
    // I + s G s may be rounded to f32; its eigenvalues are 1 or more, so that its inverse is as far off.
    const double tolerance = 4 * 6e-8 * reference::FrobeniusNorm(damped);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        ASSERT_NEAR(got.at(i, j), expected.at(i, j), tolerance) << n << ": " << i << ", " << j;
        ASSERT_EQ(got.at(i, j), got.at(j, i));
        ASSERT_EQ(half.at(0, std::max(i, j) * (std::max(i, j) + 1) / 2 + std::min(i, j)), got.at(i, j));
      }
    }
  }
}

TEST_P(ScaledPreconditionTest, AppendedRowsAndTheirGramMatrixAreTheirDefinition) {
  const std::tuple<int64_t, int64_t, std::vector<int64_t>> cases[] = {
      {1, 1, {0}}, {5, 7, {4}}, {6, 300, {2, 3}}, {9, 33, {0, 4, 8}}, {64, 129, {57, 58, 59, 60, 61, 62, 63}}};
  for (const auto& [n, d, slots] : cases) {
    const int64_t k = static_cast<int64_t>(slots.size());
    const Dense rows = RandomDense(k, d, 3), before = RandomDense(1, n * (n + 1) / 2, 5);
    Dense vectors = RandomDense(n, d, 4), poisoned = vectors;
    std::vector<double> scales(k);
    for (int64_t i = 0; i < k; ++i) {
      scales[i] = i == 1 ? 0.0 : 0.25 * static_cast<double>(1 + i);
      for (int64_t j = 0; j < d; ++j) {
        vectors.at(slots[i], j) = static_cast<float>(scales[i]) * static_cast<float>(rows.at(i, j));
        poisoned.at(slots[i], j) = NAN;
      }
    }
    Dense gram = before;
    for (int64_t i = 0; i < n * (n + 1) / 2; ++i) gram.data[i] = static_cast<float>(before.data[i]);
    const Dense products = Product(vectors, Transposed(vectors));
    Dense poisoned_gram = gram;
    for (const int64_t slot : slots) {
      for (int64_t j = 0; j < n; ++j) {
        const int64_t at = std::max(slot, j) * (std::max(slot, j) + 1) / 2 + std::min(slot, j);
        gram.data[at] = products.at(slot, j);
        poisoned_gram.data[at] = NAN;
      }
    }
    const DeviceMatrix device_rows = OnDevice(backend_, rows);
    DeviceMatrix device_vectors = OnDevice(backend_, poisoned), device_gram = OnDevice(backend_, poisoned_gram);
    ASSERT_TRUE(
        backend_.LowRankAppend(scales, device_rows.view(), slots, device_vectors.view(), device_gram.view()).ok());
    const Dense got = OnHost(backend_, device_vectors.view()), got_gram = OnHost(backend_, device_gram.view());
    for (int64_t i = 0; i < n * d; ++i) ASSERT_EQ(got.data[i], static_cast<float>(vectors.data[i])) << n << ": " << i;
    for (size_t i = 0; i < gram.data.size(); ++i) {
      ASSERT_NEAR(got_gram.data[i], gram.data[i], 6e-8 * static_cast<double>(d * d)) << n << ": " << i;
    }
  }
}

TEST_P(ScaledPreconditionTest, RefusesSlotsThatAreNone) {
  DeviceMatrix rows = OnDevice(backend_, Dense(2, 3)), vectors = OnDevice(backend_, Dense(4, 3)),
               gram = OnDevice(backend_, Dense(1, 10));
  const std::vector<double> scales(2, 1.0);
  for (const std::vector<int64_t>& slots : {std::vector<int64_t>{1, 1}, {2, 1}, {-1, 2}, {3, 4}}) {
    const absl::Status status = backend_.LowRankAppend(scales, rows.view(), slots, vectors.view(), gram.view());
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(status.message().find("LowRankAppend: slots: expected ascending rows in ["), std::string::npos) << status;
  }
  const std::vector<int64_t> slots = {0, 2};
  EXPECT_TRUE(absl::IsInvalidArgument(backend_.LowRankAppend({1.0}, rows.view(), slots, vectors.view(), gram.view())));
  EXPECT_TRUE(absl::IsInvalidArgument(backend_.LowRankAppend(scales, rows.view(), {0}, vectors.view(), gram.view())));
  EXPECT_TRUE(absl::IsInvalidArgument(backend_.LowRankAppend(scales, rows.view(), slots, vectors.view(), rows.view())));
  EXPECT_TRUE(absl::IsInvalidArgument(backend_.LowRankAppend(scales, gram.view(), slots, vectors.view(), gram.view())));
}

TEST_P(ScaledPreconditionTest, RefusesCoresThatAreNone) {
  const std::vector<double> root = {1.0};
  DeviceMatrix core = OnDevice(backend_, Dense(1, 1));
  for (const double bad : {-2.0, static_cast<double>(NAN)}) {
    const DeviceMatrix gram = OnDevice(backend_, Dense(1, 1, bad));
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
