// SPDX-License-Identifier: Apache-2.0
// Kernels move data four elements at a time where it is aligned, and keep small matrices in shared memory where they
// fit. Neither may change a bit of a result. Runs on the host's imitation of a device.
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "kernels/cuda/cuda_backend.h"
#include "tests/reference/naive_linear_algebra.h"
#include "tests/support/cuda_host/stream.h"
#include "tests/support/packed_tiles.h"
#include "tests/support/random_dense.h"

namespace precondor {
namespace {

using reference::Dense;

enum class Alignment { kFours, kOddStride, kOddStart };
constexpr float kGuard = 12345.0f;

// A matrix in device memory with guards around it, whose rows begin at multiples of 16 bytes or do not.
class Placed {
 public:
  Placed(Backend& backend, const Dense& values, Alignment alignment)
      : backend_(backend), rows_(values.rows), cols_(values.cols) {
    const int64_t stride = (cols_ + 11) / 4 * 4 + (alignment == Alignment::kOddStride ? 1 : 0);
    host_ = std::vector<float>((rows_ + 2) * stride, kGuard);
    storage_ = backend.Allocate(rows_ + 2, stride).value();
    start_ = stride + (alignment == Alignment::kOddStart ? 3 : 4);
    for (int64_t i = 0; i < rows_; ++i) {
      for (int64_t j = 0; j < cols_; ++j) host_[start_ + i * stride + j] = static_cast<float>(values.at(i, j));
    }
    EXPECT_TRUE(backend.Upload(ConstMatrixView(host_.data(), rows_ + 2, stride), storage_.view()).ok());
  }
  MatrixView view() { return MatrixView(storage_.view().data + start_, rows_, cols_, storage_.view().stride); }
  // The values; fails the test when a guard has changed.
  std::vector<float> Read() {
    const int64_t stride = storage_.view().stride;
    std::vector<float> now(host_.size()), out;
    EXPECT_TRUE(backend_.Download(storage_.view(), MatrixView(now.data(), rows_ + 2, stride)).ok());
    for (int64_t at = 0; at < static_cast<int64_t>(now.size()); ++at) {
      const int64_t i = (at - start_) / stride, j = (at - start_) % stride;
      if (at >= start_ && i < rows_ && j < cols_) {
        out.push_back(now[at]);
      } else {
        EXPECT_EQ(now[at], kGuard) << "guard at " << at;
      }
    }
    return out;
  }

 private:
  Backend& backend_;
  int64_t rows_, cols_, start_ = 0;
  std::vector<float> host_;
  DeviceMatrix storage_;
};

struct Size {
  int64_t rows, cols;
};
const Size kSizes[] = {{1, 1}, {3, 5}, {32, 128}, {33, 130}, {64, 64}, {66, 200}, {130, 68}};

class CudaKernelsTest : public testing::Test {
 protected:
  Placed Put(const Dense& values, Alignment alignment) { return Placed(*backend_, values, alignment); }
  // `run` gives a result for matrices that are aligned in each way; all must be the same to the bit.
  void ExpectAlike(const std::function<std::vector<float>(Alignment)>& run) {
    const std::vector<float> expected = run(Alignment::kFours);
    EXPECT_EQ(run(Alignment::kOddStride), expected);
    EXPECT_EQ(run(Alignment::kOddStart), expected);
  }
  const std::unique_ptr<Backend> backend_ = MakeCudaBackend({}).value();
};

TEST_F(CudaKernelsTest, ProductsDoNotDependOnAlignment) {
  for (const Transpose transpose_a : {Transpose::kNo, Transpose::kYes}) {
    for (const Transpose transpose_b : {Transpose::kNo, Transpose::kYes}) {
      for (const auto& [rows, cols] : kSizes) {
        for (const int64_t inner : {1, 6, 32, 70}) {
          SCOPED_TRACE(testing::Message() << rows << " x " << inner << " x " << cols);
          const bool turn_a = transpose_a == Transpose::kYes, turn_b = transpose_b == Transpose::kYes;
          const Dense a = turn_a ? RandomDense(inner, rows, 1) : RandomDense(rows, inner, 1);
          const Dense b = turn_b ? RandomDense(cols, inner, 2) : RandomDense(inner, cols, 2);
          ExpectAlike([&, rows = rows, cols = cols](Alignment alignment) {
            Placed left = Put(a, alignment), right = Put(b, alignment), c = Put(RandomDense(rows, cols, 3), alignment);
            EXPECT_TRUE(backend_->Gemm(.5, left.view(), transpose_a, right.view(), transpose_b, 2, c.view()).ok());
            return c.Read();
          });
        }
      }
    }
  }
}

TEST_F(CudaKernelsTest, LowRankProductsDoNotDependOnAlignment) {
  std::vector<Size> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.push_back({4, 16512});
  for (const auto precision : {ProductPrecision::kF32, ProductPrecision::kBf16, ProductPrecision::kTf32}) {
    for (const auto& [rows, cols] : sizes) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      ExpectAlike([&, rows = rows, cols = cols](Alignment alignment) {
        const int64_t rank = 5;
        Placed d = Put(RandomDense(rows, cols, 1), alignment), u = Put(Dense(rows, cols), alignment);
        Placed of_rows = Put(RandomDense(rank, rows, 2), alignment),
               of_cols = Put(RandomDense(rank, cols, 3), alignment);
        Placed core = Put(RandomDense(rank, rank, 4), alignment);
        const LowRankInverse out_side{1.5, of_rows.view(), core.view()}, in_side{.5, of_cols.view(), core.view()};
        EXPECT_TRUE(backend_->LowRankPrecondition(out_side, in_side, d.view(), u.view(), precision).ok());
        return u.Read();
      });
    }
  }
}

TEST_F(CudaKernelsTest, RoundedProductsDoNotDependOnAlignment) {
  for (const auto& [rows, cols] : kSizes) {
    SCOPED_TRACE(testing::Message() << rows << " x " << cols);
    ExpectAlike([&, rows = rows, cols = cols](Alignment alignment) {
      Placed d = Put(RandomDense(rows, cols, 1), alignment), u = Put(Dense(rows, cols), alignment);
      Placed l = Put(reference::Identity(rows), alignment), r = Put(reference::Identity(cols), alignment);
      EXPECT_TRUE(backend_->DensePrecondition(l.view(), r.view(), d.view(), u.view(), ProductPrecision::kBf16).ok());
      return u.Read();
    });
  }
}

TEST_F(CudaKernelsTest, SumsOfElementsDoNotDependOnAlignment) {
  for (const auto& [rows, cols] : kSizes) {
    SCOPED_TRACE(testing::Message() << rows << " x " << cols);
    ExpectAlike([&, rows = rows, cols = cols](Alignment alignment) {
      Placed x = Put(RandomDense(rows, cols, 1), alignment), y = Put(RandomDense(rows, cols, 2), alignment);
      EXPECT_TRUE(backend_->Axpby(.5, x.view(), 2, y.view()).ok());
      EXPECT_TRUE(backend_->Axpby(.5, y.view(), 1, y.view()).ok()) << "in place";
      return y.Read();
    });
    std::vector<double> norms[3];
    double dots[3];
    for (const Alignment alignment : {Alignment::kFours, Alignment::kOddStride, Alignment::kOddStart}) {
      const int at = static_cast<int>(alignment);
      norms[at].resize(rows);
      Placed x = Put(RandomDense(rows, cols, 1), alignment), y = Put(RandomDense(rows, cols, 2), alignment);
      ASSERT_TRUE(backend_->RowSquaredNorms(x.view(), absl::MakeSpan(norms[at])).ok());
      dots[at] = backend_->Dot(x.view(), y.view()).value();
      EXPECT_EQ(norms[at], norms[0]);
      EXPECT_EQ(dots[at], dots[0]);
    }
  }
}

TEST_F(CudaKernelsTest, AppendedRowsDoNotDependOnAlignment) {
  const int64_t rank = 7;
  for (const int64_t size : {1, 5, 128, 1030}) {
    ExpectAlike([&](Alignment alignment) {
      Placed vectors = Put(RandomDense(rank, size, 1), alignment), rows = Put(RandomDense(5, size, 2), alignment);
      Placed gram = Put(Dense(1, rank * (rank + 1) / 2), alignment);
      EXPECT_TRUE(
          backend_->LowRankAppend({1, 2, 3, 4, 5}, rows.view(), {0, 2, 3, 5, 6}, vectors.view(), gram.view()).ok());
      std::vector<float> out = vectors.Read();
      for (const float value : gram.Read()) out.push_back(value);
      return out;
    });
  }
}

TEST_F(CudaKernelsTest, ExpandedMatricesDoNotDependOnAlignment) {
  for (const int64_t n : {1, 5, 64, 66, 132}) {
    const Dense random = RandomDense(n, n, 1);
    const std::vector<float> x(random.data.begin(), random.data.end());
    for (const SymmetricStorage storage : {SymmetricStorage::kF32, SymmetricStorage::kF16}) {
      ExpectAlike([&](Alignment alignment) {
        Placed back = Put(Dense(n, n), alignment);
        SymmetricMatrix m = backend_->AllocateSymmetric(n, storage).value();
        EXPECT_TRUE(SetTiles(*backend_, ConstMatrixView(x.data(), n, n), m).ok());
        const Dense rows = RandomDense(2, n, 3);
        Placed terms = Put(rows, alignment);
        EXPECT_TRUE(backend_->SymmetricExpand({.5, 2, {1, -1}, terms.view(), m}, back.view()).ok());
        return back.Read();
      });
    }
  }
}

Dense PositiveDefinite(int64_t n) {
  const Dense x = RandomDense(n, n, 5);
  Dense a = reference::Combination(1.0 / static_cast<double>(n), reference::Product(x, reference::Transposed(x)), 1,
                                   reference::Identity(n));
  for (double& element : a.data) element = static_cast<float>(element);
  return a;
}

// In shared memory, with the panels alone there, and of many sizes beside each other in panels of 8 and blocks of 64.
TEST_F(CudaKernelsTest, InversesDoNotDependOnWhereTheyAreMade) {
  for (const int64_t n : {1, 7, 8, 9, 63, 64, 65, 130, 224, 225, 256}) {
    const Dense a = PositiveDefinite(n);
    const auto inverse = [&] {
      Placed x = Put(a, Alignment::kFours);
      EXPECT_TRUE(backend_->SpdInverse(x.view(), x.view()).ok());
      return x.Read();
    };
    const std::vector<float> in_shared = inverse();
    cuda_host::SetMostSharedBytes(48 << 10);
    EXPECT_EQ(inverse(), in_shared) << n;
    cuda_host::SetMostSharedBytes(227 << 10);
    const Dense expected = reference::SpdInverse(a);
    for (size_t at = 0; at < in_shared.size(); ++at) ASSERT_NEAR(in_shared[at], expected.data[at], 1e-7) << n;
  }
}

TEST_F(CudaKernelsTest, SaysWhichLeadingMinorIsNotPositive) {
  for (const int64_t minor : {1, 8, 9, 70}) {
    Dense a = PositiveDefinite(72);
    a.at(minor - 1, minor - 1) = -1;
    Placed x = Put(a, Alignment::kFours);
    const std::vector<float> before = x.Read();
    EXPECT_EQ(
        backend_->SpdInverse(x.view(), x.view()).message(),
        "SpdInverse: a: expected positive definite, but leading minor " + std::to_string(minor) + " of 72 is not");
    EXPECT_EQ(x.Read(), before);
  }
}

}  // namespace
}  // namespace precondor
