// SPDX-License-Identifier: Apache-2.0
// OrthogonalIteration against Gram and Schmidt in f64.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "tests/reference/naive_linear_algebra.h"
#include "tests/reference/soap.h"
#include "tests/support/random_dense.h"
#include "tests/support/test_backend.h"

namespace precondor {
namespace {

using reference::Dense;

constexpr double kEpsilon = std::numeric_limits<float>::epsilon();

double Distance(const Dense& a, const Dense& b) {
  return reference::FrobeniusNorm(reference::Combination(1, a, -1, b));
}

Dense InF32(Dense x) {
  for (double& element : x.data) element = static_cast<float>(element);
  return x;
}
// Orthonormal rows.
Dense RandomBasis(int64_t n, uint64_t seed) {
  return InF32(reference::Transposed(reference::OrthonormalColumns(RandomDense(n, n, seed))));
}
// q' diag(values) q.
Dense WithEigenvalues(const Dense& q, const std::vector<double>& values) {
  Dense scaled = q;
  for (int64_t i = 0; i < q.rows; ++i) {
    for (int64_t j = 0; j < q.cols; ++j) scaled.at(i, j) *= values[i];
  }
  return InF32(reference::Product(reference::Transposed(q), scaled));
}
// From `largest` down to largest / condition, in equal ratios.
std::vector<double> Spectrum(int64_t n, double condition, double largest = 1) {
  std::vector<double> values;
  for (int64_t i = 0; i < n; ++i) {
    values.push_back(largest *
                     std::pow(condition, n == 1 ? 0.0 : -static_cast<double>(i) / static_cast<double>(n - 1)));
  }
  return values;
}

struct Outcome {
  absl::Status status;
  Dense next;
  std::vector<int64_t> order;
};

class OrthogonalIterationTest : public testing::Test {
 protected:
  // With all matrices in the midst of others.
  Outcome Run(const Dense& a, const Dense& q, int64_t lead = 0) {
    const int64_t n = q.rows, width = n + lead + 2;
    std::vector<DeviceMatrix> all;
    std::vector<MatrixView> views;
    for (const Dense& x : {a, q, Dense(n, n, NAN)}) {
      all.push_back(backend_->Allocate(n, width).value());
      views.push_back(MatrixView(all.back().view().data + lead, n, n, width));
      const std::vector<float> host(x.data.begin(), x.data.end());
      EXPECT_TRUE(backend_->Upload(ConstMatrixView(host.data(), n, n), views.back()).ok());
    }
    Outcome out{{}, Dense(n, n), std::vector<int64_t>(static_cast<size_t>(n), -1)};
    out.status = backend_->OrthogonalIteration(views[0], views[1], views[2], absl::MakeSpan(out.order));
    std::vector<float> whole(static_cast<size_t>(n * width));
    EXPECT_TRUE(backend_->Download(all[2].view(), MatrixView(whole.data(), n, width)).ok());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        const float value = whole[static_cast<size_t>(i * width + j)];
        if (j >= lead && j < lead + n) {
          out.next.at(i, j - lead) = value;
        } else {
          EXPECT_EQ(value, 0.0f) << "beyond a row";
        }
      }
    }
    return out;
  }
  static void ExpectOrthonormal(const Dense& q) {
    const double n = static_cast<double>(q.rows);
    EXPECT_LE(Distance(reference::Product(q, reference::Transposed(q)), reference::Identity(q.rows)), 2 * n * kEpsilon);
  }

  const std::unique_ptr<Backend> backend_ = MakeTestBackend();
};

// From a basis near the eigenvectors, as soap has it, of matrices of any size and scale.
TEST_F(OrthogonalIterationTest, IsOneStepOfOrthogonalIteration) {
  for (const int64_t n : {1, 2, 3, 7, 16, 33, 64, 130}) {
    for (const double condition : {1e1, 1e3, 1e6}) {
      for (const double largest : {1e-20, 1.0, 1e20}) {
        SCOPED_TRACE(testing::Message() << n << ", condition " << condition << ", " << largest);
        const Dense vectors = RandomBasis(n, 1), turn = RandomDense(n, n, 2);
        const Dense near = reference::Combination(1, vectors, 1e-3, reference::Product(turn, vectors));
        Dense q = InF32(reference::Transposed(reference::OrthonormalColumns(reference::Transposed(near))));
        for (int64_t j = 0; n > 1 && j < n; ++j) std::swap(q.at(0, j), q.at(n - 1, j));
        const Dense a = WithEigenvalues(vectors, Spectrum(n, condition, largest));
        const Outcome got = Run(a, q, n % 2);
        ASSERT_TRUE(got.status.ok()) << got.status;

        const Dense product = reference::Product(q, a);
        std::vector<double> estimates(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < n; ++j) estimates[i] += q.at(i, j) * product.at(i, j);
        }
        std::vector<int64_t> sorted = got.order;
        std::sort(sorted.begin(), sorted.end());
        for (int64_t i = 0; i < n; ++i) EXPECT_EQ(sorted[i], i);
        for (int64_t i = 1; i < n; ++i) {
          EXPECT_GE(estimates[got.order[i - 1]], estimates[got.order[i]] - 10 * kEpsilon * largest);
        }
        Dense picked(n, n);
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < n; ++j) picked.at(i, j) = product.at(got.order[i], j);
        }
        const Dense expected = reference::Transposed(reference::OrthonormalColumns(reference::Transposed(picked)));
        ExpectOrthonormal(got.next);
        // The product's rounding of |a| eps turns the rows of small eigenvalues.
        EXPECT_LE(Distance(got.next, expected), 4 * static_cast<double>(n) * kEpsilon * condition);
      }
    }
  }
}

// Rows that are zero or depend on others get some direction that is orthogonal to them.
TEST_F(OrthogonalIterationTest, MatricesWithoutFullRankHaveOrthonormalRows) {
  for (const int64_t n : {1, 2, 7, 33, 130}) {
    for (const int64_t rank : {int64_t{0}, int64_t{1}, n / 2}) {
      SCOPED_TRACE(testing::Message() << n << ", rank " << rank);
      const Dense vectors = RandomBasis(n, 1);
      std::vector<double> values = Spectrum(n, 10);
      std::fill(values.begin() + rank, values.end(), 0.0);
      const Outcome got = Run(WithEigenvalues(vectors, values), RandomBasis(n, 5));
      ASSERT_TRUE(got.status.ok()) << got.status;
      ExpectOrthonormal(got.next);
    }
  }
}

TEST_F(OrthogonalIterationTest, OfEqualRowsTheFirstComesFirst) {
  const Outcome got = Run(reference::Identity(70), reference::Identity(70));
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.next.data, reference::Identity(70).data);
  for (int64_t i = 0; i < 70; ++i) EXPECT_EQ(got.order[i], i);
}

TEST_F(OrthogonalIterationTest, RefusesWhatIsNotFiniteAndOtherShapes) {
  for (const double bad : {NAN, INFINITY}) {
    Dense a = WithEigenvalues(RandomBasis(9, 1), Spectrum(9, 10));
    a.at(3, 4) = bad;
    const absl::Status status = Run(a, RandomBasis(9, 2)).status;
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  }
  const DeviceMatrix square = backend_->Allocate(3, 3).value(), other = backend_->Allocate(3, 4).value();
  DeviceMatrix next = backend_->Allocate(3, 3).value();
  std::vector<int64_t> three(3), four(4);
  const auto expect_refused = [](const absl::Status& status, const std::string& text) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
  };
  const auto run = [&](ConstMatrixView a, ConstMatrixView q, absl::Span<int64_t> order) {
    return backend_->OrthogonalIteration(a, q, next.view(), order);
  };
  expect_refused(run(other.view(), square.view(), absl::MakeSpan(three)), "a: expected [3, 3], got [3, 4]");
  expect_refused(run(square.view(), other.view(), absl::MakeSpan(three)), "q: expected [3, 3], got [3, 4]");
  expect_refused(run(square.view(), square.view(), absl::MakeSpan(four)), "order: expected 3 elements, got 4");
  EXPECT_TRUE(backend_->OrthogonalIteration({}, {}, MatrixView(), {}).ok());
}

}  // namespace
}  // namespace precondor
