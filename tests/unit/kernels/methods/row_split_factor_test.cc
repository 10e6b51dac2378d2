// SPDX-License-Identifier: Apache-2.0
// Factors split over 1 to 4 ranks, threads with LocalCollective, against dense f64. Sizes that do not divide d, and
// more ranks than rows.
#include "kernels/methods/row_split_factor.h"

#include <cmath>
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/local_collective.h"
#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/random_dense.h"

namespace precondor {
namespace {

using reference::Combination;
using reference::Dense;
using reference::Identity;
using reference::Product;
using reference::SpdInverse;
using reference::Transposed;

constexpr absl::Duration kAmple = absl::Seconds(100);

DeviceMatrix Uploaded(const Dense& x, Backend& backend) {
  DeviceMatrix out = *backend.Allocate(x.rows, x.cols);
  const std::vector<float> host(x.data.begin(), x.data.end());
  EXPECT_TRUE(backend.Upload(ConstMatrixView(host.data(), x.rows, x.cols), out.view()).ok());
  return out;
}

Dense Downloaded(ConstMatrixView x, Backend& backend) {
  std::vector<float> host(x.size());
  EXPECT_TRUE(backend.Download(x, MatrixView(host.data(), x.rows, x.cols)).ok());
  Dense out(x.rows, x.cols);
  std::copy(host.begin(), host.end(), out.data.begin());
  return out;
}

Dense Rows(const Dense& x, int64_t begin, int64_t count) {
  Dense out(count, x.cols);
  std::copy_n(x.data.begin() + begin * x.cols, count * x.cols, out.data.begin());
  return out;
}

// |got - want| / |want|, or |got| where nothing is wanted.
double Error(const Dense& got, const Dense& want) {
  const double scale = FrobeniusNorm(want);
  return FrobeniusNorm(Combination(1.0, got, -1.0, want)) / (scale > 0 ? scale : 1.0);
}

// Products of d terms, each rounded to f32, after a few updates of condition below 100: far from this bound in
// practice.
double Tolerance(int64_t d) { return 100.0 * std::sqrt(static_cast<double>(d)) * 0x1p-24; }

struct Rank {
  Collective& ranks;
  Backend& backend;
  RowSplitFactor& factor;

  DeviceGroup::Rank here() const { return {ranks.rank(), backend, ranks, kAmple}; }
  // M = (H^-1 + sum_i v_i v_i')^-1 with H = decay M + shift I.
  absl::Status ShermanMorrison(double decay, double shift, ConstMatrixView v, int64_t block) const {
    PRECONDOR_ASSIGN_OR_RETURN(const DeviceMatrix terms, factor.Terms(here(), decay, shift, v, block));
    return factor.Apply(decay, shift, terms.view(), terms.view());
  }
};

void OnEachRank(int size, int64_t d, const std::function<void(Rank)>& body) {
  const auto rendezvous = LocalRendezvous::Start();
  ASSERT_TRUE(rendezvous.ok());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto ranks = MakeLocalCollective((*rendezvous)->unique_id(), rank, size, kAmple);
      ASSERT_TRUE(ranks.ok()) << ranks.status();
      const auto backend = MakeCpuBackend({});
      ASSERT_TRUE(backend.ok());
      const auto factor = RowSplitFactor::Make(d, rank, size, **backend);
      ASSERT_TRUE(factor.ok()) << factor.status();
      SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", size, ", d ", d));
      body({**ranks, **backend, **factor});
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class RowSplitFactorTest : public testing::TestWithParam<std::tuple<int, int64_t>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  int64_t d() const { return std::get<1>(GetParam()); }
};

TEST_P(RowSplitFactorTest, CoversAllRowsOnceAndStartsAsTheIdentity) {
  std::vector<int64_t> begins(size()), counts(size());
  const int64_t n = d();
  OnEachRank(size(), n, [&](Rank rank) {
    begins[rank.ranks.rank()] = rank.factor.begin();
    counts[rank.ranks.rank()] = rank.factor.count();
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(n), rank.factor.begin(), rank.factor.count()).data);
    EXPECT_LE(rank.factor.rows().size() * 4, RowSplitFactor::StateBytes(n, rank.ranks.size()));
  });
  int64_t next = 0;
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(begins[rank], next);
    next += counts[rank];
  }
  EXPECT_EQ(next, n);
}

// A few updates, with vectors all at once and in blocks, then products from both sides.
TEST_P(RowSplitFactorTest, AgreesWithADenseFactor) {
  constexpr double kDecay = 0.9, kShift = 0.1;
  const int64_t n = d(), columns = 5;
  Dense m = Identity(n);
  for (const int64_t k : {2, 1, 5}) {
    const Dense v = RandomDense(k, n, 20 + k);
    const Dense h = Combination(kDecay, m, kShift, Identity(n));
    m = SpdInverse(Combination(1.0, SpdInverse(h), 1.0, Product(Transposed(v), v)));
  }
  const Dense g = RandomDense(n, columns, 41);
  const Dense left = Product(m, g), right = Product(Transposed(g), m);
  const double tolerance = Tolerance(n);
  for (const int64_t block : {1, 2, 5}) {
    std::vector<std::vector<double>> products(size());
    OnEachRank(size(), n, [&](Rank rank) {
      RowSplitFactor& factor = rank.factor;
      Backend& backend = rank.backend;
      for (const int64_t k : {2, 1, 5}) {
        const DeviceMatrix vectors = Uploaded(RandomDense(k, n, 20 + k), backend);
        ASSERT_EQ(rank.ShermanMorrison(kDecay, kShift, vectors.view(), block), absl::OkStatus());
      }
      EXPECT_LT(Error(Downloaded(factor.rows(), backend), Rows(m, factor.begin(), factor.count())), tolerance);

      const DeviceMatrix gradient = Uploaded(g, backend), turned = Uploaded(Transposed(g), backend);
      const absl::StatusOr<DeviceMatrix> product = factor.Left(rank.here(), gradient.view());
      ASSERT_TRUE(product.ok()) << product.status();
      products[rank.ranks.rank()] = Downloaded(product->view().RowRange(0, n), backend).data;
      EXPECT_LT(Error(Downloaded(product->view().RowRange(0, n), backend), left), tolerance);

      // For one rank alone, into the columns of a wider matrix.
      const bool asks = rank.ranks.rank() == rank.ranks.size() - 1;
      DeviceMatrix wide = *backend.Allocate(columns, n + 2);
      const MatrixView u = asks ? MatrixView(wide.view().data + 1, columns, n, n + 2) : MatrixView();
      ASSERT_EQ(factor.Right(rank.here(), turned.view(), u), absl::OkStatus());
      if (!asks) return;
      EXPECT_LT(Error(Downloaded(u, backend), right), tolerance);
      for (int64_t i = 0; i < columns; ++i) {
        EXPECT_EQ(Downloaded(wide.view(), backend).at(i, 0), 0);
        EXPECT_EQ(Downloaded(wide.view(), backend).at(i, n + 1), 0);
      }
    });
    for (int rank = 1; rank < size(); ++rank) EXPECT_EQ(products[rank], products[0]) << "the same bits on all ranks";
  }
}

TEST_P(RowSplitFactorTest, TakesRowsOfTheHost) {
  const int64_t n = d();
  const Dense m = RandomDense(n, n, 5);
  OnEachRank(size(), n, [&](Rank rank) {
    const Dense own = Rows(m, rank.factor.begin(), rank.factor.count());
    const std::vector<float> host(own.data.begin(), own.data.end());
    for (int64_t i = 0; i < own.rows; ++i) {
      ASSERT_EQ(rank.factor.Upload(i, ConstMatrixView(host.data() + i * n, 1, n)), absl::OkStatus());
    }
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data, own.data);
  });
}

INSTANTIATE_TEST_SUITE_P(SizesAndDimensions, RowSplitFactorTest,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(1, 3, 10, 67, 128)));

TEST(RowSplitFactorErrorsTest, RefusesBadShapesBeforeAnythingIsSent) {
  using testing::HasSubstr;
  OnEachRank(2, 5, [](Rank rank) {
    const DeviceMatrix wide = Uploaded(RandomDense(2, 6, 1), rank.backend);
    DeviceMatrix out = *rank.backend.Allocate(5, 3);
    const auto expect_invalid = [](const absl::Status& status, const std::string& part) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("row-split factor of 5: " + part));
    };
    const DeviceGroup::Rank here = rank.here();
    expect_invalid(rank.factor.Terms(here, 1, 0, wide.view(), 2).status(), "vectors: expected [2, 5], got [2, 6]");
    expect_invalid(rank.factor.Apply(1, 0, wide.view(), wide.view()), "left terms: expected [2, 5], got [2, 6]");
    expect_invalid(rank.factor.Left(here, wide.view()).status(), "gradient: expected [5, 6], got [2, 6]");
    expect_invalid(rank.factor.Right(here, wide.view(), out.view()), "gradient: expected [2, 5], got [2, 6]");
    expect_invalid(rank.factor.Right(here, ConstMatrixView(out.view().data, 3, 5), out.view()),
                   "result: expected [3, 5], got [5, 3]");
    EXPECT_EQ(rank.ranks.Barrier(kAmple), absl::OkStatus());
    EXPECT_EQ(RowSplitFactor::Make(0, 0, 1, rank.backend).status().code(), absl::StatusCode::kInvalidArgument);
  });
}

TEST_P(RowSplitFactorTest, OnlyDecaysAndShiftsWithoutVectors) {
  const int64_t n = d();
  OnEachRank(size(), n, [n](Rank rank) {
    DeviceMatrix none = *rank.backend.Allocate(0, n);
    ASSERT_EQ(rank.ShermanMorrison(2.0, -1.0, none.view(), 1), absl::OkStatus());
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(n), rank.factor.begin(), rank.factor.count()).data);
  });
}

TEST(RowSplitFactorErrorsTest, LeavesTheFactorAloneForVectorsThatAreNotFinite) {
  OnEachRank(2, 5, [](Rank rank) {
    Dense v = RandomDense(2, 5, 3);
    v.at(1, 2) = std::numeric_limits<double>::quiet_NaN();
    const DeviceMatrix vectors = Uploaded(v, rank.backend);
    for (const int64_t block : {1, 2}) {
      EXPECT_EQ(rank.ShermanMorrison(0.9, 0.1, vectors.view(), block).code(), absl::StatusCode::kFailedPrecondition);
    }
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(5), rank.factor.begin(), rank.factor.count()).data);
    EXPECT_EQ(rank.ranks.status(), absl::OkStatus()) << "all ranks find the same, and go on";
  });
}

TEST(RowSplitFactorErrorsTest, PassesOnThatARankIsLost) {
  OnEachRank(3, 7, [](Rank rank) {
    if (rank.ranks.rank() == 1) return rank.ranks.Abort("gone");
    const DeviceMatrix v = Uploaded(RandomDense(1, 7, 3), rank.backend);
    EXPECT_EQ(rank.ShermanMorrison(0.9, 0.1, v.view(), 1), absl::AbortedError("rank 1 aborted: gone"));
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(7), rank.factor.begin(), rank.factor.count()).data);
  });
}

}  // namespace
}  // namespace precondor
