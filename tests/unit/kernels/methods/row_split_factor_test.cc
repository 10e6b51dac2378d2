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
      const auto factor = RowSplitFactor::Make(d, kAmple, **backend, **ranks);
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

// A few updates of each kind, then products from both sides.
TEST_P(RowSplitFactorTest, AgreesWithADenseFactor) {
  constexpr double kDecay = 0.9, kShift = 0.1;
  const int64_t n = d(), columns = 5;
  Dense m = Identity(n);
  for (const int64_t k : {1, 3}) {
    const Dense v = RandomDense(k, n, 7 + k);
    m = Combination(kDecay, m, 0.5 / static_cast<double>(k), Product(Transposed(v), v));
    m = Combination(1.0, m, 0.25, Identity(n));
  }
  for (const int64_t k : {2, 1, 4}) {
    const Dense v = RandomDense(k, n, 20 + k);
    const Dense h = Combination(kDecay, m, kShift, Identity(n));
    m = SpdInverse(Combination(1.0, SpdInverse(h), 1.0, Product(Transposed(v), v)));
  }
  const Dense v = RandomDense(3, n, 40), g = RandomDense(n, columns, 41), r = RandomDense(columns, columns, 42);
  const Dense u = Product(Product(m, g), r);
  const double tolerance = Tolerance(n);
  std::vector<std::vector<double>> products(size()), answers(size());
  OnEachRank(size(), n, [&](Rank rank) {
    RowSplitFactor& factor = rank.factor;
    Backend& backend = rank.backend;
    for (const int64_t k : {1, 3}) {
      const DeviceMatrix vectors = Uploaded(RandomDense(k, n, 7 + k), backend);
      ASSERT_EQ(factor.Update(kDecay, 0.25, 0.5 / static_cast<double>(k), vectors.view()), absl::OkStatus());
    }
    for (const int64_t k : {2, 1, 4}) {
      const DeviceMatrix vectors = Uploaded(RandomDense(k, n, 20 + k), backend);
      ASSERT_EQ(factor.ShermanMorrison(kDecay, kShift, vectors.view()), absl::OkStatus());
    }
    EXPECT_LT(Error(Downloaded(factor.rows(), backend), Rows(m, factor.begin(), factor.count())), tolerance);

    DeviceMatrix product = Uploaded(v, backend);
    ASSERT_EQ(factor.Multiply(product.view(), product.view()), absl::OkStatus());
    products[rank.ranks.rank()] = Downloaded(product.view(), backend).data;
    EXPECT_LT(Error(Downloaded(product.view(), backend), Product(v, m)), tolerance);

    const DeviceMatrix right = Uploaded(r, backend), gradient = Uploaded(g, backend);
    DeviceMatrix answer = *backend.Allocate(n, columns);
    ASSERT_EQ(factor.Precondition(gradient.view(), right.view(), answer.view()), absl::OkStatus());
    answers[rank.ranks.rank()] = Downloaded(answer.view(), backend).data;
    EXPECT_LT(Error(Downloaded(answer.view(), backend), u), tolerance);

    DeviceMatrix own = Uploaded(Rows(g, factor.begin(), factor.count()), backend);
    ASSERT_EQ(factor.PreconditionRows(own.view(), right.view(), own.view()), absl::OkStatus());
    EXPECT_LT(Error(Downloaded(own.view(), backend), Rows(u, factor.begin(), factor.count())), 10 * tolerance);
  });
  for (int rank = 1; rank < size(); ++rank) {
    EXPECT_EQ(products[rank], products[0]) << "the same bits on all ranks";
    EXPECT_EQ(answers[rank], answers[0]) << "the same bits on all ranks";
  }
}

INSTANTIATE_TEST_SUITE_P(SizesAndDimensions, RowSplitFactorTest,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(1, 3, 10, 67, 128)));

TEST(RowSplitFactorErrorsTest, RefusesBadShapesBeforeAnythingIsSent) {
  using testing::HasSubstr;
  OnEachRank(2, 5, [](Rank rank) {
    const DeviceMatrix wide = Uploaded(RandomDense(2, 6, 1), rank.backend), right = Uploaded(Identity(3), rank.backend);
    DeviceMatrix out = *rank.backend.Allocate(5, 3);
    const auto expect_invalid = [](const absl::Status& status, const std::string& part) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("row-split factor of 5: " + part));
    };
    expect_invalid(rank.factor.Update(1, 0, 1, wide.view()), "vectors: expected [2, 5], got [2, 6]");
    expect_invalid(rank.factor.ShermanMorrison(1, 0, wide.view()), "vectors: expected [2, 5], got [2, 6]");
    expect_invalid(rank.factor.Multiply(wide.view(), out.view()), "v: expected [2, 5], got [2, 6]");
    expect_invalid(rank.factor.Precondition(wide.view(), right.view(), out.view()), "gradient: expected [5, 6]");
    expect_invalid(rank.factor.PreconditionRows(out.view(), right.view(), out.view()),
                   "rows of the gradient: expected");
    EXPECT_EQ(rank.ranks.Barrier(kAmple), absl::OkStatus());
    EXPECT_EQ(RowSplitFactor::Make(0, kAmple, rank.backend, rank.ranks).status().code(),
              absl::StatusCode::kInvalidArgument);
  });
}

TEST_P(RowSplitFactorTest, OnlyDecaysAndShiftsWithoutVectors) {
  const int64_t n = d();
  OnEachRank(size(), n, [n](Rank rank) {
    DeviceMatrix none = *rank.backend.Allocate(0, n);
    ASSERT_EQ(rank.factor.Multiply(none.view(), none.view()), absl::OkStatus());
    ASSERT_EQ(rank.factor.Update(0.5, 0.25, 1.0, none.view()), absl::OkStatus());      // 0.75 I
    ASSERT_EQ(rank.factor.ShermanMorrison(2.0, -0.5, none.view()), absl::OkStatus());  // I
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(n), rank.factor.begin(), rank.factor.count()).data);
  });
}

TEST(RowSplitFactorErrorsTest, LeavesTheFactorAloneForVectorsThatAreNotFinite) {
  OnEachRank(2, 5, [](Rank rank) {
    Dense v = RandomDense(2, 5, 3);
    v.at(1, 2) = std::numeric_limits<double>::quiet_NaN();
    const DeviceMatrix vectors = Uploaded(v, rank.backend);
    EXPECT_EQ(rank.factor.ShermanMorrison(0.9, 0.1, vectors.view()).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(5), rank.factor.begin(), rank.factor.count()).data);
    EXPECT_EQ(rank.ranks.status(), absl::OkStatus()) << "all ranks find the same, and go on";
  });
}

TEST(RowSplitFactorErrorsTest, PassesOnThatARankIsLost) {
  OnEachRank(3, 7, [](Rank rank) {
    if (rank.ranks.rank() == 1) return rank.ranks.Abort("gone");
    const DeviceMatrix v = Uploaded(RandomDense(1, 7, 3), rank.backend);
    EXPECT_EQ(rank.factor.ShermanMorrison(0.9, 0.1, v.view()), absl::AbortedError("rank 1 aborted: gone"));
    EXPECT_EQ(Downloaded(rank.factor.rows(), rank.backend).data,
              Rows(Identity(7), rank.factor.begin(), rank.factor.count()).data);
  });
}

}  // namespace
}  // namespace precondor
