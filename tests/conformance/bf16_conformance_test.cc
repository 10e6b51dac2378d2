// SPDX-License-Identifier: Apache-2.0
// DensePrecondition with products of bf16 numbers against naive f64.
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <vector>

#include "kernels/cpu/vector_ops.h"
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

// `gap` elements of guard behind each row.
DeviceMatrix PutWide(Backend& backend, const Dense& x, int64_t gap) {
  std::vector<float> host(x.rows * (x.cols + gap), 1e30f);
  for (int64_t i = 0; i < x.rows; ++i) {
    for (int64_t j = 0; j < x.cols; ++j) host[i * (x.cols + gap) + j] = static_cast<float>(x.at(i, j));
  }
  DeviceMatrix device = backend.Allocate(x.rows, x.cols + gap).value();
  EXPECT_TRUE(backend.Upload(ConstMatrixView(host.data(), x.rows, x.cols + gap), device.view()).ok());
  return device;
}
MatrixView Narrow(DeviceMatrix& x, int64_t gap) {
  return MatrixView(x.view().data, x.rows(), x.cols() - gap, x.cols());
}

// Rounding changes each element of l, d, l d, r and l d r by 2^-9 of it at most, so that no norm changes by more, and
// |l d r| <= |l| |d| |r| in Frobenius' norm: 5 * 2^-9 of that, and a little for f32's sums.
TEST(Bf16ConformanceTest, ADensePreconditionIsOffByItsRoundingAlone) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  if (!backend->KnowsProducts(ProductPrecision::kBf16)) GTEST_SKIP() << "no oneDNN, or no AVX512_BF16";
  constexpr int64_t kGap = 3;
  for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {3, 70}, {70, 3}, {33, 65}, {64, 64}, {31, 64}, {130, 200}, {257, 129}, {96, 1100}}) {
    const Dense l = Symmetric(m, 1), r = Symmetric(n, 2), d = RandomDense(m, n, 3);
    const Dense expected = reference::Product(reference::Product(l, d), r);
    DeviceMatrix dl = PutWide(*backend, l, kGap), dr = PutWide(*backend, r, kGap), dd = PutWide(*backend, d, kGap);
    DeviceMatrix du = PutWide(*backend, Dense(m, n, NAN), kGap);
    ASSERT_TRUE(backend
                    ->DensePrecondition(Narrow(dl, kGap), Narrow(dr, kGap), Narrow(dd, kGap), Narrow(du, kGap),
                                        ProductPrecision::kBf16)
                    .ok());
    std::vector<float> got(m * (n + kGap));
    ASSERT_TRUE(backend->Download(du.view(), MatrixView(got.data(), m, n + kGap)).ok());
    double square = 0;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) square += std::pow(got[i * (n + kGap) + j] - expected.at(i, j), 2);
      for (int64_t j = n; j < n + kGap; ++j) EXPECT_EQ(got[i * (n + kGap) + j], 1e30f) << "beyond a row";
    }
    const double bound = 5.1 / 512 * FrobeniusNorm(l) * FrobeniusNorm(d) * FrobeniusNorm(r);
    EXPECT_LE(std::sqrt(square), bound) << m << " x " << n;
    EXPECT_LE(std::sqrt(square), 0.01 * FrobeniusNorm(expected)) << m << " x " << n;  // roundings are independent
  }
}

TEST(Bf16ConformanceTest, ABackendWithoutItSaysSo) {
  const std::unique_ptr<Backend> inner = MakeTestBackend();
  FaultyBackend backend(*inner);  // has the defaults
  EXPECT_FALSE(backend.KnowsProducts(ProductPrecision::kBf16));
  DeviceMatrix l = backend.Allocate(2, 2).value(), d = backend.Allocate(2, 2).value(),
               u = backend.Allocate(2, 2).value();
  const absl::Status status =
      backend.DensePrecondition(l.view(), l.view(), d.view(), u.view(), ProductPrecision::kBf16);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("expected F32"), absl::string_view::npos) << status;
}

// Nearest, and the even one of two that are as near: from the definition, by trying both neighbours.
TEST(Bf16ConformanceTest, RoundsToTheNearestEven) {
  std::vector<float> values = {0.0f, -0.0f, 1.0f, 1.00390625f, 1.01171875f, -1.00390625f, 3.0e38f, 1e-40f, -1e-38f};
  for (int i = 0; i < 60; ++i) values.push_back(static_cast<float>(std::sin(i) * std::pow(2.0, i - 30)));
  std::vector<uint16_t> rounded(values.size());
  std::vector<uint32_t> pairs(values.size()), lone(values.size());
  cpu::RoundToBf16(values.data(), static_cast<int64_t>(values.size()), rounded.data());
  std::vector<float> reversed(values.rbegin(), values.rend());
  cpu::PairAsBf16(values.data(), reversed.data(), static_cast<int64_t>(values.size()), pairs.data());
  cpu::PairAsBf16(values.data(), nullptr, static_cast<int64_t>(values.size()), lone.data());
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof(bits));
    const auto number = [](uint32_t upper) {
      const uint32_t whole = upper << 16;
      float value;
      std::memcpy(&value, &whole, sizeof(value));
      return static_cast<double>(value);
    };
    const uint32_t below = bits >> 16, above = below + 1;
    const double to_below = std::fabs(values[i] - number(below)), to_above = std::fabs(number(above) - values[i]);
    const uint32_t expected = to_below != to_above ? (to_below < to_above ? below : above)
                              : below % 2 == 0     ? below
                                                   : above;
    EXPECT_EQ(rounded[i], expected) << values[i];
    EXPECT_EQ(pairs[i] & 0xffff, rounded[i]);
    EXPECT_EQ(pairs[values.size() - 1 - i] >> 16, rounded[i]);
    EXPECT_EQ(lone[i], rounded[i]);
  }
}

}  // namespace
}  // namespace precondor
