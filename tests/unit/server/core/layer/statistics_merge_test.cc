// SPDX-License-Identifier: Apache-2.0
// Merged contributions against second moments in double precision.
#include "server/core/layer/statistics_merge.h"

#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <memory>
#include <random>

#include "kernels/cpu/cpu_backend.h"
#include "server/core/layer/admission.h"
#include "server/core/resources/reservation.h"

namespace precondor {
namespace {

using Rows = std::vector<std::vector<double>>;  // of one rank: [n][d], values that f32 has

Rows Normal(int64_t n, int64_t d, std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0, 1);
  Rows rows(static_cast<size_t>(n), std::vector<double>(static_cast<size_t>(d)));
  for (auto& row : rows) {
    for (double& value : row) value = normal(rng);
  }
  return rows;
}

// sum_r samples_r / N (1/n_r) sum_i x_i x_i'.
std::vector<double> Moment(const std::vector<Rows>& ranks, const std::vector<uint64_t>& samples, size_t d) {
  double total = 0;
  for (const uint64_t count : samples) total += static_cast<double>(count);
  std::vector<double> moment(d * d);
  for (size_t r = 0; r < ranks.size(); ++r) {
    const double weight = static_cast<double>(samples[r]) / total / static_cast<double>(ranks[r].size());
    for (const auto& row : ranks[r]) {
      for (size_t i = 0; i < d; ++i) {
        for (size_t j = 0; j < d; ++j) moment[i * d + j] += weight * row[i] * row[j];
      }
    }
  }
  return moment;
}

class StatisticsMergeTest : public ::testing::Test {
 protected:
  void Shape(int64_t d_out, int64_t d_in) {
    spec_.world_size = 3;
    spec_.statistics = StatisticsKind::kCovariance;
    spec_.statistics_dtype = DType::kF32;
    spec_.layers = {{"only", d_out, d_in, false}};
  }

  // One side of one rank as it travels: rows, or packed.
  static void Append(const Rows& rows, bool packed, Payload& out) {
    const size_t d = rows[0].size();
    std::vector<float> values;
    if (packed) {
      const std::vector<double> moment = Moment({rows}, {1}, d);
      for (size_t i = 0; i < d; ++i) {
        for (size_t j = 0; j <= i; ++j) values.push_back(static_cast<float>(moment[i * d + j]));
      }
    } else {
      for (const auto& row : rows) values.insert(values.end(), row.begin(), row.end());
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    out.insert(out.end(), bytes, bytes + values.size() * sizeof(float));
  }

  struct Rank {
    Rows a, g;
    uint64_t samples = 1;
    bool a_packed = false, g_packed = false;
  };

  // Merges, and compares either form of each side with what it stands for.
  void ExpectMerged(const std::vector<Rank>& ranks, bool a_rows, bool g_rows) {
    std::vector<StagedContribution> contributions;
    std::vector<Rows> a, g;
    std::vector<uint64_t> samples;
    for (const Rank& rank : ranks) {
      StagedContribution contribution{.samples = rank.samples};
      if (!rank.a_packed) contribution.rows[0] = static_cast<int64_t>(rank.a.size());
      if (!rank.g_packed) contribution.rows[1] = static_cast<int64_t>(rank.g.size());
      Append(rank.a, rank.a_packed, contribution.bytes);
      Append(rank.g, rank.g_packed, contribution.bytes);
      contributions.push_back(std::move(contribution));
      a.push_back(rank.a);
      g.push_back(rank.g);
      samples.push_back(rank.samples);
    }
    ScratchPool pool(*backend_);
    absl::StatusOr<ScratchPool::Lease> scratch = pool.Acquire(StatisticsScratchElements(spec_, 0));
    ASSERT_TRUE(scratch.ok());
    const absl::StatusOr<LayerStatistics> merged = MergeStatistics(spec_, 0, contributions, *backend_, *scratch);
    ASSERT_TRUE(merged.ok()) << merged.status();
    EXPECT_EQ(merged->a.data != nullptr, a_rows);
    EXPECT_EQ(merged->g.data != nullptr, g_rows);
    ExpectSide(merged->a, merged->a_covariance, Moment(a, samples, a[0][0].size()));
    ExpectSide(merged->g, merged->g_covariance, Moment(g, samples, g[0][0].size()));
  }

  void ExpectSide(ConstMatrixView rows, ConstMatrixView packed, const std::vector<double>& expected) {
    const auto d = static_cast<int64_t>(std::lround(std::sqrt(static_cast<double>(expected.size()))));
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        double got = 0;
        if (rows.data != nullptr) {
          for (int64_t r = 0; r < rows.rows; ++r) got += static_cast<double>(rows.at(r, i)) * rows.at(r, j);
          got /= static_cast<double>(rows.rows);
        } else {
          got = packed.data[i * (i + 1) / 2 + j];
        }
        // f32 products and sums of a few dozen terms of order one.
        EXPECT_NEAR(got, expected[static_cast<size_t>(i * d + j)], 1e-5) << i << ", " << j;
      }
    }
  }

  SessionSpec spec_;
  std::unique_ptr<Backend> backend_ = *MakeCpuBackend({});
  std::mt19937_64 rng_{1};
};

TEST_F(StatisticsMergeTest, StacksRowsWhileTheyAreFewerThanATriangle) {
  Shape(9, 12);
  const std::vector<Rank> ranks = {{.a = Normal(1, 12, rng_), .g = Normal(1, 9, rng_), .samples = 5},
                                   {.a = Normal(3, 12, rng_), .g = Normal(1, 9, rng_), .samples = 2},
                                   {.a = Normal(2, 12, rng_), .g = Normal(2, 9, rng_), .samples = 9}};
  ExpectMerged(ranks, true, true);
}

TEST_F(StatisticsMergeTest, AveragesTrianglesRowsAndBoth) {
  Shape(5, 12);
  // a: seven rows are more than a triangle of 12 takes, so they are multiplied out; g: one packed, one as rows.
  const std::vector<Rank> ranks = {{.a = Normal(4, 12, rng_), .g = Normal(40, 5, rng_), .samples = 5, .g_packed = true},
                                   {.a = Normal(3, 12, rng_), .g = Normal(2, 5, rng_), .samples = 2}};
  ExpectMerged(ranks, false, false);
  const std::vector<Rank> packed = {
      {.a = Normal(30, 12, rng_), .g = Normal(30, 5, rng_), .samples = 1, .a_packed = true, .g_packed = true},
      {.a = Normal(20, 12, rng_), .g = Normal(20, 5, rng_), .samples = 7, .a_packed = true, .g_packed = true}};
  ExpectMerged(packed, false, false);
}

TEST_F(StatisticsMergeTest, ASideOfDimensionOneIsATriangle) {
  Shape(1, 3);
  ExpectMerged({{.a = Normal(1, 3, rng_), .g = Normal(4, 1, rng_), .g_packed = true}}, true, false);
}

class CovariancePayloadTest : public StatisticsMergeTest {
 protected:
  ContributionHeader Header(std::vector<int64_t> a, std::vector<int64_t> g) const {
    ContributionHeader header;
    header.tensors = {{.dtype = DType::kF32, .dims = std::move(a)}, {.dtype = DType::kF32, .dims = std::move(g)}};
    return header;
  }
  static uint64_t Bytes(const ContributionHeader& header) {
    uint64_t bytes = 0;
    for (const TensorDesc& tensor : header.tensors) bytes += 4 * tensor.dims[0] * tensor.dims[1];
    return bytes;
  }
};

TEST_F(CovariancePayloadTest, TakesTrianglesAndFewRows) {
  Shape(4, 6);
  for (const auto& a : std::vector<std::vector<int64_t>>{{1, 21}, {1, 6}, {3, 6}}) {
    const ContributionHeader header = Header(a, {1, 10});
    EXPECT_TRUE(CheckTensors(spec_, header, Bytes(header)).ok()) << CheckTensors(spec_, header, Bytes(header));
    EXPECT_EQ(RowsOf(spec_, header)[0], a[1] == 21 ? 0 : a[0]);
    EXPECT_EQ(RowsOf(spec_, header)[1], 0);
  }
  for (const auto& a : std::vector<std::vector<int64_t>>{{4, 6}, {2, 21}, {1, 20}, {0, 6}, {6}, {1, 1, 6}}) {
    const absl::Status status = CheckTensors(spec_, Header(a, {1, 10}), 100);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("a: expected [1, 21] or up to [3, 6], got ["), std::string::npos) << status;
  }
}

TEST_F(CovariancePayloadTest, HoldsTheTraceAgainstTheLimit) {
  Shape(1, 2);
  const ContributionHeader header = Header({1, 3}, {1, 1});
  const auto check = [&](std::vector<float> values) {
    Payload payload(values.size() * sizeof(float));
    std::memcpy(payload.data(), values.data(), payload.size());
    return CheckStatistics(spec_, header, payload, 10);
  };
  EXPECT_TRUE(check({99, -1e5, 101, 1}).ok()) << "trace 200 is 10 sqrt(2) squared";
  EXPECT_EQ(check({99, 0, 102, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(check({-150, 0, 150, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(check({1, std::nanf(""), 1, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(check({1, 0, 1, INFINITY}).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace precondor
