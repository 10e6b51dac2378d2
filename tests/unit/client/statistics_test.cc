// SPDX-License-Identifier: Apache-2.0
#include "precondor/statistics.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cpp/src/signed_sums.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

SessionSpec Spec(StatisticsKind kind, int32_t sketches = 1) {
  SessionSpec spec;
  spec.world_size = 4;
  spec.statistics = kind;
  spec.sketches = sketches;
  return spec;
}

std::vector<float> Normal(int64_t count, uint64_t seed, double mean = 0) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal(mean, 1);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = static_cast<float>(normal(rng));
  return out;
}

std::vector<float> Compute(const SessionSpec& spec, const SketchKey& key, ConstMatrixView rows, double scale) {
  std::vector<float> out(static_cast<size_t>(VectorsPerWorker(spec, 0) * rows.cols), -77.0f);
  const absl::Status status =
      ComputeStatistics(spec, key, rows, scale, MatrixView(out.data(), VectorsPerWorker(spec, 0), rows.cols));
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// The signs themselves: sketches of the unit vectors, [sketches][rows], each +1 or -1.
std::vector<std::vector<int>> Signs(const SketchKey& key, int64_t rows, int32_t sketches) {
  std::vector<float> unit(static_cast<size_t>(rows * rows));
  for (int64_t i = 0; i < rows; ++i) unit[static_cast<size_t>(i * rows + i)] = 1;
  const std::vector<float> v = Compute(Spec(StatisticsKind::kSigned, sketches), key,
                                       ConstMatrixView(unit.data(), rows, rows), std::sqrt(static_cast<double>(rows)));
  std::vector<std::vector<int>> signs(static_cast<size_t>(sketches));
  for (int32_t j = 0; j < sketches; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      const float value = v[static_cast<size_t>(j * rows + i)];
      EXPECT_NEAR(std::abs(value), 1.0, 1e-6);
      signs[static_cast<size_t>(j)].push_back(value > 0 ? 1 : -1);
    }
  }
  return signs;
}

double Correlation(const std::vector<int>& x, const std::vector<int>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum / static_cast<double>(x.size());
}

struct Shape {
  int64_t rows, cols;
};

class ComputeStatisticsTest : public ::testing::TestWithParam<Shape> {
 protected:
  // f32 sums of at most 64 terms folded into f64: 64 half-ulps of the sum of magnitudes at worst.
  static constexpr double kTolerance = 64 * 6e-8;
};

TEST_P(ComputeStatisticsTest, MeansAreTheMean) {
  const auto [n, d] = GetParam();
  const std::vector<float> x = Normal(n * d, 1, 0.5);
  for (const StatisticsKind kind : {StatisticsKind::kMean, StatisticsKind::kPerWorkerMean}) {
    const std::vector<float> v = Compute(Spec(kind), {}, ConstMatrixView(x.data(), n, d), 3.0);
    for (int64_t c = 0; c < d; ++c) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < n; ++i) {
        sum += x[static_cast<size_t>(i * d + c)];
        magnitude += std::abs(x[static_cast<size_t>(i * d + c)]);
      }
      const double scale = 3.0 / static_cast<double>(n);
      EXPECT_NEAR(v[static_cast<size_t>(c)], scale * sum, scale * magnitude * kTolerance) << "column " << c;
    }
  }
}

TEST_P(ComputeStatisticsTest, SketchesAreSignedSums) {
  const auto [n, d] = GetParam();
  constexpr int32_t kSketches = 3;
  const SketchKey key{11, 5, 2, Side::kOutput, 1};
  const std::vector<std::vector<int>> signs = Signs(key, n, kSketches);
  const std::vector<float> x = Normal(n * (d + 2), 2, 0.5);
  const std::vector<float> v =
      Compute(Spec(StatisticsKind::kSigned, kSketches), key, ConstMatrixView(x.data(), n, d, d + 2), 2.0);
  for (int32_t j = 0; j < kSketches; ++j) {
    for (int64_t c = 0; c < d; ++c) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double value = x[static_cast<size_t>(i * (d + 2) + c)];
        sum += signs[static_cast<size_t>(j)][static_cast<size_t>(i)] * value;
        magnitude += std::abs(value);
      }
      const double scale = 2.0 / std::sqrt(static_cast<double>(n));
      EXPECT_NEAR(v[static_cast<size_t>(j * d + c)], scale * sum, scale * magnitude * kTolerance)
          << "sketch " << j << " column " << c;
    }
  }
}

TEST_P(ComputeStatisticsTest, CovariancesAreTheRowsOrTheirSecondMoment) {
  const auto [n, d] = GetParam();
  const SessionSpec spec = Spec(StatisticsKind::kCovariance);
  const std::vector<float> x = Normal(n * (d + 2), 4, 0.5);
  const ConstMatrixView rows(x.data(), n, d, d + 2);
  const StatisticsShape shape = ShapeOfStatistics(spec, 0, d, n);
  const bool packed = 2 * n * d >= d * (d + 1);
  EXPECT_EQ(shape.rows, packed ? 1 : n);
  EXPECT_EQ(shape.cols, packed ? d * (d + 1) / 2 : d);
  std::vector<float> out(static_cast<size_t>(shape.rows * shape.cols), -77.0f);
  const absl::Status status = ComputeStatistics(spec, {}, rows, 2.0, MatrixView(out.data(), shape.rows, shape.cols));
  ASSERT_TRUE(status.ok()) << status;
  for (int64_t i = 0; i < (packed ? d : n); ++i) {
    for (int64_t j = 0; j < (packed ? i + 1 : d); ++j) {
      double expected = packed ? 0 : 2.0 * rows.at(i, j);
      double magnitude = std::abs(expected);
      for (int64_t r = 0; packed && r < n; ++r) {
        const double product = 4.0 / static_cast<double>(n) * rows.at(r, i) * rows.at(r, j);
        expected += product;
        magnitude += std::abs(product);
      }
      const int64_t at = packed ? i * (i + 1) / 2 + j : i * d + j;
      // f32 sums of n terms.
      EXPECT_NEAR(out[static_cast<size_t>(at)], expected, magnitude * static_cast<double>(n + 1) * 6e-8)
          << i << " " << j;
    }
  }
}

// In parts, with the 1 of a bias: the sums of the whole.
TEST_P(ComputeStatisticsTest, SketchSumsOfPartsAddUp) {
  const auto [n, d] = GetParam();
  constexpr int32_t kSketches = 11;
  const SketchKey key{11, 5, 2, Side::kInput, 1};
  const std::vector<std::vector<int>> signs = Signs(key, n, kSketches);
  const std::vector<float> x = Normal(n * d, 2, 0.5);
  std::vector<double> sums(static_cast<size_t>(kSketches * (d + 1)));
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, n / 3}, {n / 3, n}}) {
    if (begin == end) continue;
    std::vector<float> part(sums.size(), -77.0f);
    const ConstMatrixView rows(x.data() + begin * d, end - begin, d);
    const absl::Status status =
        SketchSums(key, static_cast<uint64_t>(begin), rows, MatrixView(part.data(), kSketches, d + 1));
    ASSERT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += part[i];
  }
  for (int32_t j = 0; j < kSketches; ++j) {
    for (int64_t c = 0; c <= d; ++c) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double value = c == d ? 1.0 : x[static_cast<size_t>(i * d + c)];
        sum += signs[static_cast<size_t>(j)][static_cast<size_t>(i)] * value;
        magnitude += std::abs(value);
      }
      EXPECT_NEAR(sums[static_cast<size_t>(j * (d + 1) + c)], sum, magnitude * kTolerance) << j << " " << c;
    }
  }
}

TEST_P(ComputeStatisticsTest, EveryWayToSumGivesTheSameBits) {
  const auto [n, d] = GetParam();
  constexpr int64_t kSketches = 13;
  const std::vector<float> x = Normal(n * (d + 2), 3, 0.5);
  const ConstMatrixView rows(x.data(), n, d, d + 2);
  std::mt19937 rng(1);
  std::vector<uint32_t> signs(static_cast<size_t>(n));
  for (uint32_t& word : signs) word = static_cast<uint32_t>(rng());
  const auto sums = [&](size_t way) {
    std::vector<float> out(static_cast<size_t>(kSketches * rows.cols), -77.0f);
    SignedSums(rows, signs, 0.7, MatrixView(out.data(), kSketches, rows.cols), way);
    return out;
  };
  for (size_t way = 1; way < SignedSumsWays(); ++way) EXPECT_EQ(sums(way), sums(0)) << "way " << way;
}

TEST(SketchSumsTest, RefusesOtherShapes) {
  std::vector<float> x(100);
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 3}, {17, 3}, {2, 2}, {2, 5}}) {
    const absl::Status status =
        SketchSums({}, 0, ConstMatrixView(x.data(), 4, 3), MatrixView(x.data() + 12, rows, cols));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("got rows [4, 3] and out ["));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ComputeStatisticsTest,
                         ::testing::Values(Shape{1, 1}, Shape{1, 300}, Shape{3, 1}, Shape{7, 257}, Shape{65, 256},
                                           Shape{130, 513}));

TEST(SignsTest, ArePureFunctionsOfTheKeyAndTheRow) {
  const SketchKey key{1, 2, 3, Side::kInput, 0};
  const auto all = Signs(key, 200, 16);
  EXPECT_EQ(all, Signs(key, 200, 16));
  // Neither the number of rows nor the number of sketches changes the sign of a (row, sketch).
  const auto fewer = Signs(key, 50, 2);
  for (size_t j = 0; j < fewer.size(); ++j) {
    EXPECT_EQ(fewer[j], std::vector<int>(all[j].begin(), all[j].begin() + 50));
  }
}

TEST(SignsTest, AreGivenForAnyRangeOfRows) {
  constexpr int64_t kRows = 40, kFirst = 23;
  constexpr int32_t kSketches = 5;
  const SketchKey key{11, 4, 2, Side::kOutput, 3};
  const std::vector<std::vector<int>> signs = Signs(key, kRows, kSketches);
  std::vector<float> given(kSketches * (kRows - kFirst), -77.0f);
  SketchSigns(key, kFirst, MatrixView(given.data(), kSketches, kRows - kFirst));
  for (int64_t j = 0; j < kSketches; ++j) {
    for (int64_t i = kFirst; i < kRows; ++i) {
      EXPECT_EQ(given[static_cast<size_t>(j * (kRows - kFirst) + i - kFirst)],
                signs[static_cast<size_t>(j)][static_cast<size_t>(i)])
          << j << " " << i;
    }
  }
}

TEST(SignsTest, AreIndependentAcrossEveryPartOfTheKey) {
  constexpr int64_t kRows = 512;
  // |correlation| of independent signs exceeds 5 / sqrt(rows) with probability 6e-7.
  const double bound = 5 / std::sqrt(static_cast<double>(kRows));
  const SketchKey base{1, 2, 3, Side::kInput, 0};
  const std::vector<int> ones(kRows, 1);
  std::vector<SketchKey> keys = {base};
  for (uint64_t delta = 1; delta <= 4; ++delta) {
    for (int part = 0; part < 4; ++part) {
      SketchKey key = base;
      if (part == 0) key.seed += delta;
      if (part == 1) key.step += delta;
      if (part == 2) key.layer += static_cast<uint32_t>(delta);
      if (part == 3) key.rank += static_cast<uint32_t>(delta);
      keys.push_back(key);
      key.side = Side::kOutput;
      keys.push_back(key);
    }
  }
  std::vector<std::vector<int>> rows;
  for (const SketchKey& key : keys) {
    for (std::vector<int>& signs : Signs(key, kRows, 2)) rows.push_back(std::move(signs));
  }
  for (size_t a = 0; a < rows.size(); ++a) {
    EXPECT_LT(std::abs(Correlation(rows[a], ones)), bound) << "mean of " << a;
    for (size_t b = 0; b < a; ++b) EXPECT_LT(std::abs(Correlation(rows[a], rows[b])), bound) << a << " and " << b;
  }
}

TEST(SketchTest, EstimatesTheWholeCovarianceWithoutBias) {
  constexpr int64_t kRows = 12, kCols = 4;
  constexpr int kDraws = 4000;
  const std::vector<float> x = Normal(kRows * kCols, 3, 0.3);
  std::vector<double> want(kCols * kCols), have(kCols * kCols), cross(kCols * kCols);
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t a = 0; a < kCols; ++a) {
      for (int64_t b = 0; b < kCols; ++b) {
        want[static_cast<size_t>(a * kCols + b)] +=
            static_cast<double>(x[static_cast<size_t>(i * kCols + a)]) * x[static_cast<size_t>(i * kCols + b)] / kRows;
      }
    }
  }
  const SessionSpec spec = Spec(StatisticsKind::kSigned, 4);
  const ConstMatrixView rows(x.data(), kRows, kCols);
  for (uint64_t step = 0; step < kDraws; ++step) {
    const std::vector<float> a = Compute(spec, {9, step, 0, Side::kInput, 0}, rows, 1);
    const std::vector<float> g = Compute(spec, {9, step, 0, Side::kOutput, 0}, rows, 1);
    for (size_t j = 0; j < 4; ++j) {
      for (size_t c = 0; c < kCols; ++c) {
        for (size_t e = 0; e < kCols; ++e) {
          have[c * kCols + e] += static_cast<double>(a[j * kCols + c]) * a[j * kCols + e] / (4 * kDraws);
          cross[c * kCols + e] += static_cast<double>(a[j * kCols + c]) * g[j * kCols + e] / (4 * kDraws);
        }
      }
    }
  }
  // An element's standard deviation is at most about 2 trace-scaled units; 16,000 sketches divide it by 126.
  double trace = 0;
  for (size_t c = 0; c < kCols; ++c) trace += want[c * kCols + c];
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(have[i], want[i], 0.05 * trace) << i;
    EXPECT_NEAR(cross[i], 0, 0.05 * trace) << i;
  }
}

TEST(VectorsTest, RefusesWrongShapes) {
  std::vector<float> x(12), v(12);
  const SessionSpec spec = Spec(StatisticsKind::kSigned, 2);
  const auto message = [&](ConstMatrixView rows, MatrixView out) {
    const absl::Status status = ComputeStatistics(spec, {}, rows, 1, out);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message(ConstMatrixView(x.data(), 0, 3), MatrixView(v.data(), 2, 3)), HasSubstr("got [0, 3]"));
  EXPECT_THAT(message(ConstMatrixView(x.data(), 4, 3), MatrixView(v.data(), 1, 3)),
              HasSubstr("expected [2, 3], got [1, 3]"));
  EXPECT_THAT(message(ConstMatrixView(x.data(), 4, 3), MatrixView(v.data(), 2, 4)),
              HasSubstr("expected [2, 3], got [2, 4]"));
}

TEST(KlClipScaleTest, FollowsTheFormula) {
  EXPECT_DOUBLE_EQ(KlClipScale({30.0, 10.0}, 0.1, 0.001), std::sqrt(0.001 / (0.01 * 40)));
  EXPECT_DOUBLE_EQ(KlClipScale({-30.0, -10.0}, 0.1, 0.001), std::sqrt(0.001 / (0.01 * 40)));
  EXPECT_EQ(KlClipScale({0.001}, 0.1, 0.001), 1.0);
  EXPECT_EQ(KlClipScale({1.0, -1.0}, 0.1, 0.001), 1.0);
  EXPECT_EQ(KlClipScale({}, 0.1, 0.001), 1.0);
  EXPECT_EQ(KlClipScale({std::numeric_limits<double>::quiet_NaN()}, 0.1, 0.001), 0.0);
}

}  // namespace
}  // namespace precondor
