// SPDX-License-Identifier: Apache-2.0
// Which dimensions are merged, and modes as matrices.
#include "kernels/methods/tensor.h"

#include <gtest/gtest.h>
#include <numeric>
#include <vector>

#include "tests/reference/tensor.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

using Dims = std::vector<int64_t>;
constexpr int64_t kAnyLength = int64_t{1} << 40;

struct MergeCase {
  Dims dims;
  int64_t target;
  Dims merged;
};

// The answers of distributed_kron 2.0.0.
TEST(MergeSmallDimsTest, MergesAsPublished) {
  const std::vector<MergeCase> cases = {
      {{256, 128, 3, 3}, 256, {256, 1152}},
      {{512, 512, 3, 3}, 256, {512, 512, 9}},
      {{64, 3, 7, 7}, 256, {64, 147}},
      {{16, 3, 3, 3}, 256, {432}},
      {{64, 12, 3, 3}, 256, {64, 108}},
      {{512, 512, 3, 3}, 4096, {512, 4608}},
      {{64, 64, 3, 3}, 4096, {36864}},
      {{64, 3, 7, 7}, 4096, {9408}},
      {{128, 1, 5, 5}, 256, {128, 25}},
      {{1, 64, 1, 96}, 256, {64, 96}},
      {{2048, 2, 2, 2, 2}, 256, {2048, 16}},
      {{30, 20, 10, 5}, 100, {30, 20, 50}},
      {{50000, 3, 3}, 256, {50000, 9}},
      {{2, 2, 2, 2, 2, 2, 2, 2}, 4, {4, 4, 4, 4}},
      {{5, 4, 3}, 256, {60}},
      {{1, 1, 1}, 256, {1}},
      {{7}, 256, {7}},
  };
  for (const MergeCase& c : cases) {
    EXPECT_EQ(MergeSmallDims(c.dims, c.target, kAnyLength), c.merged) << ::testing::PrintToString(c.dims);
  }
}

// There a merged dimension keeps its triangular factor however long it is.
TEST(MergeSmallDimsTest, MergesToNothingLongerThanTheBound) {
  EXPECT_EQ(MergeSmallDims(Dims{64, 64, 3, 3}, 4096, 8192), (Dims{64, 576}));
  EXPECT_EQ(MergeSmallDims(Dims{5, 4, 3}, 256, 59), (Dims{5, 12}));
  EXPECT_EQ(MergeSmallDims(Dims{5, 4, 3}, 256, 60), Dims{60});
  EXPECT_EQ(MergeSmallDims(Dims{50000, 3, 3}, 256, 8), (Dims{50000, 3, 3})) << "alone it stays as it is";
}

// 64 x 147 and 192 x 49 have one penalty but for its rounding.
TEST(MergeSmallDimsTest, TakesTheShorterFirstGroupOfEquals) {
  EXPECT_EQ(MergeSmallDims(Dims{64, 3, 7, 7}, 4096, 8192), (Dims{64, 147}));
  EXPECT_EQ(MergeSmallDims(Dims{3, 3, 3}, 9, 9), (Dims{3, 9}));
}

std::vector<float> Counted(int64_t elements) {
  std::vector<float> values(elements);
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

// q times the mode from the side that it says, for every mode, against the definition; integers are exact.
TEST(ModeMatrixTest, MultipliesAlongEachMode) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const Dims& dims : {Dims{3, 4}, Dims{5}, Dims{3, 4, 2}, Dims{2, 5, 3}, Dims{2, 3, 4, 2}, Dims{1, 3, 1, 2},
                           Dims{1, 1, 1}, Dims{2, 2, 3, 2, 2}}) {
    for (size_t mode = 0; mode < dims.size(); ++mode) {
      SCOPED_TRACE(::testing::PrintToString(dims) + " mode " + std::to_string(mode));
      const int64_t n = ElementsOf(dims), d = dims[mode];
      const std::vector<float> values = Counted(n), q = Counted(d * d);
      reference::Tensor expected(dims);
      expected.data.assign(values.begin(), values.end());
      reference::Dense naive_q(d, d);
      naive_q.data.assign(q.begin(), q.end());
      const reference::Dense gram = reference::ModeGram(expected, mode);
      expected = reference::ModeProduct(naive_q, mode, expected);

      DeviceMatrix x = backend->Allocate(dims[0], n / dims[0]).value();
      DeviceMatrix factor = backend->Allocate(d, d).value(), of_gram = backend->Allocate(d, d).value();
      ASSERT_TRUE(backend->Upload(ConstMatrixView(values.data(), x.rows(), x.cols()), x.view()).ok());
      ASSERT_TRUE(backend->Upload(ConstMatrixView(q.data(), d, d), factor.view()).ok());
      ModeMatrix along = ModeMatrix::Of(dims, mode, x.view(), *backend).value();
      const bool left = along.side() == From::kLeft;
      const ConstMatrixView seen = along.view();
      ASSERT_EQ(left ? seen.rows : seen.cols, d);
      ASSERT_TRUE(backend->Gemm(1.0, seen, Transpose(!left), seen, Transpose(left), 0.0, of_gram.view()).ok());
      EXPECT_EQ(ToHost(*backend, of_gram.view()), [&] {
        reference::Vectors rows;
        for (int64_t i = 0; i < d; ++i) {
          rows.emplace_back(gram.data.begin() + i * d, gram.data.begin() + (i + 1) * d);
        }
        return rows;
      }());
      DeviceMatrix product = backend->Allocate(seen.rows, seen.cols).value();
      ASSERT_TRUE((left ? backend->Gemm(1.0, factor.view(), Transpose::kNo, seen, Transpose::kNo, 0.0, product.view())
                        : backend->Gemm(1.0, seen, Transpose::kNo, factor.view(), Transpose::kYes, 0.0, product.view()))
                      .ok());
      DeviceMatrix filled = backend->Allocate(x.rows(), x.cols()).value();
      ModeMatrix to_fill = ModeMatrix::ToFill(dims, mode, filled.view(), *backend).value();
      ASSERT_EQ(to_fill.side(), along.side());
      for (ModeMatrix* matrix : {&along, &to_fill}) {
        ASSERT_TRUE(backend->Copy(product.view(), matrix->view()).ok());
        ASSERT_TRUE(matrix->WriteBack(*backend).ok());
      }
      for (const DeviceMatrix* tensor : {&x, &filled}) {
        reference::Vector got;
        for (const reference::Vector& row : ToHost(*backend, tensor->view())) {
          got.insert(got.end(), row.begin(), row.end());
        }
        EXPECT_EQ(got, expected.data);
      }
    }
  }
}

}  // namespace
}  // namespace precondor
