// SPDX-License-Identifier: Apache-2.0
// Symmetric matrices in tiles on every backend, and the defaults of what multiplies by them, against loops over
// doubles.
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/backend.h"
#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/device_dense.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/packed_tiles.h"
#include "tests/support/random_dense.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using reference::Dense;

struct Device {
  std::unique_ptr<Backend> inner;
  std::unique_ptr<Backend> backend;
};

struct DeviceCase {
  std::string name;
  std::function<Device()> make;
};

std::vector<DeviceCase> Devices() {
  return {{"backend",
           [] {
             return Device{nullptr, MakeTestBackend()};
           }},
          {"defaults", [] {
             Device device{MakeTestBackend(), nullptr};
             device.backend = std::make_unique<FaultyBackend>(*device.inner);
             return device;
           }}};
}

Dense RandomSymmetric(int64_t n, uint64_t seed) {
  Dense x = Uniform(n, n, seed);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) x.at(j, i) = x.at(i, j);
  }
  return x;
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class SymmetricConformanceTest : public testing::TestWithParam<DeviceCase> {
 protected:
  void SetUp() override { device_ = GetParam().make(); }
  Backend& backend() { return *device_.backend; }

  using Guarded = GuardedMatrix;
  Guarded Put(const Dense& x) { return Guarded(backend(), x); }
  SymmetricMatrix Compressed(const Dense& x, SymmetricStorage storage) {
    SymmetricMatrix m = backend().AllocateSymmetric(x.rows, storage).value();
    const std::vector<float> host(x.data.begin(), x.data.end());
    EXPECT_TRUE(SetTiles(backend(), ConstMatrixView(host.data(), x.rows, x.rows), m).ok());
    return m;
  }
  Dense Expanded(const SymmetricMatrix& m) {
    Guarded x = Put(Dense(m.n(), m.n(), kNaN));
    EXPECT_TRUE(backend().SymmetricExpand({1.0, 0.0, {}, ConstMatrixView(nullptr, 0, m.n()), m}, x.view()).ok());
    return x.Read();
  }
  static std::vector<SymmetricStorage> Storages() { return {SymmetricStorage::kF32, SymmetricStorage::kF16}; }
  static double Rounding(SymmetricStorage storage) {
    return storage == SymmetricStorage::kF32 ? std::numeric_limits<float>::epsilon() / 2 : std::ldexp(1.0, -11);
  }

  void CheckUpdate(SymmetricStorage storage, int64_t n, double scale, double shift, const std::vector<double>& weights,
                   int64_t k) {
    const int64_t p = static_cast<int64_t>(weights.size());
    const Dense x = RandomSymmetric(n, 3), rows = Uniform(p, n, 4), v = Uniform(k, n, 5);
    Dense weighted = rows;
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t j = 0; j < n; ++j) weighted.at(i, j) *= weights[i];
    }
    const Dense terms = reference::Product(reference::Transposed(rows), weighted);
    const Dense expected =
        reference::Combination(1, reference::Combination(scale, x, 1, terms), shift, reference::Identity(n));
    SymmetricMatrix m = Compressed(x, storage);
    Guarded device_rows = Put(rows), device_v = Put(v), y = Put(Dense(k, n, kNaN));
    ASSERT_TRUE(backend()
                    .SymmetricUpdateMultiply(scale, shift, weights, device_rows.view(), m, device_v.view(), y.view())
                    .ok());
    // Each element: p products of numbers up to |weight| and the sums with them, then rounded to storage; it was
    // rounded to storage before.
    double size = 1 + std::fabs(shift);
    for (const double weight : weights) size += std::fabs(weight);
    const double bound = (static_cast<double>(4 * p + 6) * Rounding(SymmetricStorage::kF32) +
                          (storage == SymmetricStorage::kF16 ? 2 * Rounding(storage) : 0)) *
                         size;
    const Dense got = Expanded(m);
    for (size_t i = 0; i < got.data.size(); ++i) ASSERT_NEAR(got.data[i], expected.data[i], bound);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) ASSERT_EQ(got.at(i, j), got.at(j, i));
    }
    // The matrix is the stored one, so that its rounding does not enter.
    const Dense product = reference::Product(v, got), got_y = y.Read();
    const double length = static_cast<double>(n);
    const double y_bound = (length + 2) * Rounding(SymmetricStorage::kF32) * length * size;
    for (size_t i = 0; i < got_y.data.size(); ++i) ASSERT_NEAR(got_y.data[i], product.data[i], y_bound) << n;
  }

  Device device_;
};

constexpr int64_t kSizes[] = {1, 2, 17, 63, 64, 65, 128, 191, 200};

TEST_P(SymmetricConformanceTest, HoldsWhatItWasGiven) {
  for (const SymmetricStorage storage : Storages()) {
    for (const int64_t n : kSizes) {
      const Dense x = RandomSymmetric(n, 3);
      const SymmetricMatrix m = Compressed(x, storage);
      EXPECT_EQ(m.n(), n);
      const Dense got = Expanded(m);
      for (size_t i = 0; i < x.data.size(); ++i) {
        const double bound = storage == SymmetricStorage::kF32 ? 0 : Rounding(storage) * std::fabs(x.data[i]) + 3e-8;
        ASSERT_NEAR(got.data[i], x.data[i], bound) << n;
      }
    }
  }
}

TEST_P(SymmetricConformanceTest, IsZeroAtBirthAndTakesWhatTheLayoutSays) {
  for (const SymmetricStorage storage : Storages()) {
    for (const int64_t n : kSizes) {
      const int64_t before = backend().allocated_bytes();
      const SymmetricMatrix m = backend().AllocateSymmetric(n, storage).value();
      EXPECT_EQ(backend().allocated_bytes() - before, TileBytes(n, storage));
      EXPECT_THAT(Expanded(m).data, testing::Each(0.0));
    }
    EXPECT_TRUE(backend().AllocateSymmetric(0, storage)->empty());
  }
  // Half of a full matrix, and of each tile row's last tile the other half.
  EXPECT_LE(TileBytes(1024, SymmetricStorage::kF32), 1024 * 1024 * 2 + 1024 * 64 * 2);
  EXPECT_EQ(TileBytes(4096, SymmetricStorage::kF16), TileBytes(4096, SymmetricStorage::kF32) / 2);
}

TEST_P(SymmetricConformanceTest, UpdatesAndMultipliesByTheDefinition) {
  const std::vector<std::vector<double>> all_weights = {{}, {-0.5}, {0.25, -1.5, 0.0, 2.0, -0.125}};
  for (const SymmetricStorage storage : Storages()) {
    for (const int64_t n : kSizes) {
      for (const std::vector<double>& weights : all_weights) {
        for (const auto& [scale, shift] : {std::pair(1.0, 0.0), {0.75, 0.0}, {1.0, -0.5}, {0.5, 0.25}}) {
          for (const int64_t k : {0, 1, 3}) CheckUpdate(storage, n, scale, shift, weights, k);
        }
      }
    }
  }
}

// While terms wait, the full matrix and the product are those of a matrix that has them.
TEST_P(SymmetricConformanceTest, ExpandsToTheBitWhatAnUpdateWouldStore) {
  for (const int64_t n : kSizes) {
    const std::vector<double> weights = {-0.5, 0.375, -2.0};
    const Dense x = RandomSymmetric(n, 3);
    SymmetricMatrix m = Compressed(x, SymmetricStorage::kF32);
    Guarded rows = Put(Uniform(3, n, 4)), expanded = Put(Dense(n, n, kNaN)), none = Put(Dense(0, n));
    ASSERT_TRUE(backend().SymmetricExpand({0.75, 0.125, weights, rows.view(), m}, expanded.view()).ok());
    EXPECT_EQ(Expanded(m).data, x.data) << "m is an input";
    ASSERT_TRUE(backend().SymmetricUpdateMultiply(0.75, 0.125, weights, rows.view(), m, none.view(), none.view()).ok());
    EXPECT_EQ(Expanded(m).data, expanded.Read().data);
  }
}

// One pass or two: callers may put the update off or repeat a multiplication and see the same bits.
TEST_P(SymmetricConformanceTest, FusedIsUpdateThenMultiplyToTheBit) {
  for (const SymmetricStorage storage : Storages()) {
    const int64_t n = 150;
    const std::vector<double> weights = {-0.5, 0.375};
    const Dense x = RandomSymmetric(n, 3);
    SymmetricMatrix fused = Compressed(x, storage), apart = Compressed(x, storage);
    Guarded rows = Put(Uniform(2, n, 4)), v = Put(Uniform(5, n, 5)), none = Put(Dense(0, n));
    Guarded y_fused = Put(Dense(5, n)), y_apart = Put(Dense(5, n)), y_single = Put(Dense(1, n));
    ASSERT_TRUE(
        backend().SymmetricUpdateMultiply(0.75, 0.125, weights, rows.view(), fused, v.view(), y_fused.view()).ok());
    ASSERT_TRUE(
        backend().SymmetricUpdateMultiply(0.75, 0.125, weights, rows.view(), apart, none.view(), none.view()).ok());
    ASSERT_TRUE(backend().SymmetricUpdateMultiply(1.0, 0.0, {}, none.view(), apart, v.view(), y_apart.view()).ok());
    EXPECT_EQ(Expanded(fused).data, Expanded(apart).data);
    EXPECT_EQ(y_fused.Read().data, y_apart.Read().data);
  }
}

// Whole tiles and views at the beginning of memory may be worked on where they are; others are copied.
TEST_P(SymmetricConformanceTest, WhereVectorsLieChangesNoBit) {
  constexpr int64_t kSide = 192;
  for (const SymmetricStorage storage : Storages()) {
    SymmetricMatrix m = Compressed(RandomSymmetric(kSide, 3), storage);
    const Dense random = Uniform(1, kSide, 5);
    const std::vector<float> v(random.data.begin(), random.data.end()), nans(kSide, kNaN);
    std::vector<std::vector<float>> products;
    for (const int64_t shift : {0, 1}) {
      DeviceMatrix in = *backend().Allocate(1, kSide + 1), out = *backend().Allocate(1, kSide + 1);
      const MatrixView in_view(in.view().data + shift, 1, kSide), out_view(out.view().data + shift, 1, kSide);
      ASSERT_TRUE(backend().Upload(ConstMatrixView(v.data(), 1, kSide), in_view).ok());
      ASSERT_TRUE(backend().Upload(ConstMatrixView(nans.data(), 1, kSide), out_view).ok());
      const ConstMatrixView none(in.view().data, 0, kSide);
      ASSERT_TRUE(backend().SymmetricUpdateMultiply(1.0, 0.0, {}, none, m, in_view, out_view).ok());
      std::vector<float> product(kSide);
      ASSERT_TRUE(backend().Download(out_view, MatrixView(product.data(), 1, kSide)).ok());
      products.push_back(product);
    }
    EXPECT_EQ(products[0], products[1]);
  }
}

TEST_P(SymmetricConformanceTest, RawMemoryMovesAMatrix) {
  for (const SymmetricStorage storage : Storages()) {
    const SymmetricMatrix from = Compressed(RandomSymmetric(130, 3), storage);
    SymmetricMatrix to = backend().AllocateSymmetric(130, storage).value();
    ASSERT_TRUE(backend().Copy(from.raw(), to.raw()).ok());
    EXPECT_EQ(Expanded(to).data, Expanded(from).data);
  }
}

// Products with what is still to be expanded, and the lengths that their rule sees. bf16 rounds five times by 2^-9 of
// an element at most, TF32 four times by 2^-10; f16 keeps elements to 2^-11.
TEST_P(SymmetricConformanceTest, MultipliesByFormsAsByTheirMatrices) {
  const std::vector<double> weights = {-0.5, 0.375, -2.0};
  for (const SymmetricStorage storage : Storages()) {
    for (const auto& [m, n] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {65, 17}, {64, 130}, {200, 70}}) {
      SymmetricMatrix tiles = Compressed(RandomSymmetric(m, 3), storage);
      Guarded rows = Put(Uniform(3, m, 4)), full = Put(RandomSymmetric(n, 5)), d = Put(Uniform(m, n, 6));
      DeviceMatrix made;
      const SymmetricForm l(0.75, 0.125, weights, rows.view(), tiles);
      const ConstMatrixView there = precondor::Expanded(backend(), l, made).value();
      Guarded left = Put(Dense(m, m));
      ASSERT_TRUE(backend().Copy(there, left.view()).ok());
      const Dense of_d = d.Read(), expected = reference::Product(reference::Product(left.Read(), of_d), full.Read());
      for (const ProductPrecision precision :
           {ProductPrecision::kF32, ProductPrecision::kBf16, ProductPrecision::kTf32}) {
        if (!backend().SupportsPrecision(precision)) continue;
        Guarded u = Put(Dense(m, n, kNaN));
        double d_length = 0, u_length = 0;
        const auto rule = [&](double of_gradient, double of_answer) {
          d_length = of_gradient;
          u_length = of_answer;
          return absl::StatusOr<double>(0.5);
        };
        ASSERT_TRUE(backend().DensePrecondition(l, full.view(), d.view(), rule, u.view(), precision).ok());
        const Dense got = u.Read();
        const double most = FrobeniusNorm(left.Read()) * FrobeniusNorm(of_d) * FrobeniusNorm(full.Read());
        const double tolerance = precision == ProductPrecision::kBf16   ? 5.1 / 512
                                 : precision == ProductPrecision::kTf32 ? 4.1 / 1024
                                                                        : 1e-6;
        EXPECT_LE(FrobeniusNorm(reference::Combination(2, got, -1, expected)), tolerance * most) << m << " x " << n;
        EXPECT_NEAR(d_length, FrobeniusNorm(of_d), 1e-6 * d_length);
        EXPECT_NEAR(u_length, 2 * FrobeniusNorm(got), 1e-5 * u_length);
      }
    }
  }
}

// sum_i terms_i' terms_i = U'(I + V U')^-1 U, with no U, V or h as the backend has them.
TEST_P(SymmetricConformanceTest, ShermanMorrisonTermsAreWhatAStepTakesAway) {
  for (const auto& [n, k, p] : {std::array<int64_t, 3>{1, 1, 0},
                                {7, 1, 3},
                                {64, 2, 1},
                                {65, 5, 16},
                                {300, 1, 16},
                                {131, 16, 2},
                                {40, 17, 3},
                                {33, 3, 33},
                                {1030, 2, 7}}) {
    const Dense m = RandomSymmetric(n, 3), rows = Uniform(p, n, 4), v = Uniform(k, n, 5), y = reference::Product(v, m);
    std::vector<double> weights;
    for (int64_t i = 0; i < p; ++i) weights.push_back(0.5 + static_cast<double>(i % 3));
    // Diagonally dominant, so that h is positive definite, and not far from it that its parts count.
    const double scale = 0.75, shift = static_cast<double>(n), factor = 0.3 / std::sqrt(shift);
    Dense weighted = rows;
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t j = 0; j < n; ++j) weighted.at(i, j) *= weights[i];
    }
    const Dense of_rows = p == 0 ? Dense(n, n) : reference::Product(reference::Transposed(rows), weighted);
    const Dense h =
        reference::Combination(1, reference::Combination(scale, m, 1, of_rows), shift, reference::Identity(n));
    const Dense scaled = reference::Combination(factor, v, 0, v), u = reference::Product(scaled, h);
    const Dense core = reference::SpdInverse(
        reference::Combination(1, reference::Product(scaled, reference::Transposed(u)), 1, reference::Identity(k)));
    const Dense expected = reference::Product(reference::Transposed(u), reference::Product(core, u));

    Guarded device_rows = Put(rows), device_v = Put(v), work = Put(y), terms = Put(Dense(k, n, kNaN));
    std::vector<double> squares(n, kNaN);
    const SymmetricForm form(scale, shift, weights, device_rows.view());
    const absl::Status made = backend().ShermanMorrisonTerms(form, factor, device_v.view(), work.view(), terms.view(),
                                                             absl::MakeSpan(squares));
    ASSERT_TRUE(made.ok()) << made;
    EXPECT_EQ(device_v.Read().data, v.data);
    const Dense got = terms.Read(), product = reference::Product(reference::Transposed(got), got);
    EXPECT_LE(Distance(product, expected), 2e-5 * FrobeniusNorm(expected)) << n << " " << k << " " << p;
    for (int64_t j = 0; j < n; ++j) ASSERT_NEAR(squares[j], product.at(j, j), 1e-6 * product.at(j, j) + 1e-12) << j;
    // Without squares, and the same.
    Guarded again = Put(y), others = Put(Dense(k, n, kNaN));
    ASSERT_TRUE(backend().ShermanMorrisonTerms(form, factor, device_v.view(), again.view(), others.view(), {}).ok());
    EXPECT_EQ(others.Read().data, got.data);
  }
}

TEST_P(SymmetricConformanceTest, RefusesShermanMorrisonTermsOfWhatIsNotFinite) {
  for (const int64_t k : {1, 3, 17}) {
    Dense v = Uniform(k, 40, 5);
    v.at(k - 1, 39) = std::numeric_limits<double>::infinity();
    Guarded device_v = Put(v), y = Put(Uniform(k, 40, 6)), terms = Put(Dense(k, 40));
    const SymmetricForm form(1.0, 1.0, {}, ConstMatrixView(nullptr, 0, 40));
    const absl::Status status = backend().ShermanMorrisonTerms(form, 1.0, device_v.view(), y.view(), terms.view(), {});
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << k << ": " << status;
  }
}

TEST_P(SymmetricConformanceTest, RefusesWrongShapesByName) {
  SymmetricMatrix m = backend().AllocateSymmetric(5, SymmetricStorage::kF32).value();
  Guarded five = Put(Dense(5, 5)), row = Put(Dense(1, 5)), wrong = Put(Dense(1, 4)), none = Put(Dense(0, 5));
  const std::vector<double> one = {1.0};
  const auto message = [](const absl::Status& status) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  using testing::HasSubstr;
  EXPECT_THAT(message(backend().SymmetricUpdateMultiply(1, 0, one, wrong.view(), m, row.view(), row.view())),
              HasSubstr("SymmetricUpdateMultiply: rows: expected [1, 5], got [1, 4]"));
  EXPECT_THAT(message(backend().SymmetricUpdateMultiply(1, 0, one, none.view(), m, row.view(), row.view())),
              HasSubstr("rows: expected [1, 5], got [0, 5]"));
  EXPECT_THAT(message(backend().SymmetricUpdateMultiply(1, 0, {}, none.view(), m, wrong.view(), row.view())),
              HasSubstr("v: expected [1, 5], got [1, 4]"));
  EXPECT_THAT(message(backend().SymmetricUpdateMultiply(1, 0, {}, none.view(), m, row.view(), none.view())),
              HasSubstr("y: expected [1, 5], got [0, 5]"));
  EXPECT_THAT(message(backend().SymmetricExpand({1, 0, {}, none.view(), m}, row.view())),
              HasSubstr("x: expected [5, 5]"));
  const SymmetricForm form(1, 0, {}, none.view(), m), wrong_terms(1, 0, one, none.view(), m);
  EXPECT_THAT(message(backend().DensePrecondition(form, five.view(), wrong.view(), wrong.view())),
              HasSubstr("DensePrecondition: l: expected [1, 1], got [5, 5]"));
  EXPECT_THAT(message(backend().DensePrecondition(five.view(), wrong_terms, five.view(), five.view())),
              HasSubstr("DensePrecondition: rows: expected [1, 5], got [0, 5]"));
  const SymmetricForm apart(1, 0, one, row.view()), too_narrow(1, 0, one, wrong.view());
  const auto terms = [&](const SymmetricForm& h, MatrixView v, MatrixView y, MatrixView out,
                         absl::Span<double> squares) {
    return message(backend().ShermanMorrisonTerms(h, 1.0, v, y, out, squares));
  };
  Guarded y = Put(Dense(1, 5)), out = Put(Dense(1, 5));
  std::vector<double> four(4);
  EXPECT_THAT(terms(too_narrow, row.view(), y.view(), out.view(), {}),
              HasSubstr("ShermanMorrisonTerms: rows: expected [1, 5], got [1, 4]"));
  EXPECT_THAT(terms(apart, row.view(), wrong.view(), out.view(), {}), HasSubstr("y: expected [1, 5], got [1, 4]"));
  EXPECT_THAT(terms(apart, row.view(), y.view(), wrong.view(), {}), HasSubstr("terms: expected [1, 5], got [1, 4]"));
  EXPECT_THAT(terms(apart, row.view(), y.view(), out.view(), absl::MakeSpan(four)),
              HasSubstr("squares: expected 5 or none, got 4"));
  EXPECT_THAT(message(backend().AllocateSymmetric(-1, SymmetricStorage::kF32).status()), HasSubstr("got -1"));
}

INSTANTIATE_TEST_SUITE_P(All, SymmetricConformanceTest, testing::ValuesIn(Devices()),
                         [](const testing::TestParamInfo<DeviceCase>& info) { return info.param.name; });

}  // namespace
}  // namespace precondor
