// SPDX-License-Identifier: Apache-2.0
#include "kernels/grouping/deferred_task.h"

#include <gtest/gtest.h>
#include <random>
#include <set>
#include <vector>

namespace precondor {
namespace {

Operation Axpby(ConstMatrixView x, MatrixView y) { return {operation::Elementwise{.alpha = 1, .x = x, .y = y}}; }

TEST(OperandsTest, ReadersOfOneMatrixAreIndependent) {
  std::vector<float> memory(64);
  const MatrixView x(memory.data(), 4, 4), y(memory.data() + 16, 4, 4), z(memory.data() + 32, 4, 4);
  EXPECT_TRUE(AreIndependent(Axpby(x, y), Axpby(x, z)));
  EXPECT_FALSE(AreIndependent(Axpby(x, y), Axpby(y, z)));
  EXPECT_FALSE(AreIndependent(Axpby(y, z), Axpby(x, y)));
  EXPECT_FALSE(AreIndependent(Axpby(x, z), Axpby(y, z)));
  double out = 0;
  EXPECT_TRUE(AreIndependent({operation::Dot{x, x, &out}}, {operation::Dot{x, y, &out}}));
  EXPECT_FALSE(AreIndependent({operation::Dot{x, x, &out}}, Axpby(y, x)));
  EXPECT_TRUE(AreIndependent(Axpby(MatrixView(nullptr, 0, 4), y), Axpby(MatrixView(nullptr, 0, 4), z)));
}

// One side of a layer waits for nothing that the other does.
TEST(OperandsTest, TermsFollowTheProductThatTheyAreMadeOf) {
  std::vector<float> memory(640);
  const MatrixView rows(memory.data(), 4, 8), v(memory.data() + 32, 1, 8), y(memory.data() + 40, 1, 8);
  const MatrixView tiles(memory.data() + 64, 8, 8), other_v(memory.data() + 512, 1, 8),
      other_y(memory.data() + 520, 1, 8);
  operation::SymmetricUpdateMultiply of_tiles;
  of_tiles.rows = rows.RowRange(0, 2);
  of_tiles.raw = tiles;
  of_tiles.v = v;
  of_tiles.y = y;
  const Operation product{of_tiles};
  const auto terms = [&](ConstMatrixView of, MatrixView work, int64_t row) {
    operation::ShermanMorrisonTerms out;
    out.h.rows = rows.RowRange(0, 2);
    out.v = of;
    out.y = work;
    out.terms = rows.RowRange(row, 1);
    return Operation{out};
  };
  EXPECT_FALSE(AreIndependent(product, terms(v, y, 2)));
  EXPECT_FALSE(AreIndependent(product, terms(other_v, other_y, 1))) << "a row that the product reads";
  EXPECT_TRUE(AreIndependent(product, terms(other_v, other_y, 2)));
  EXPECT_FALSE(AreIndependent(terms(v, y, 2), terms(v, other_y, 2)));
  EXPECT_TRUE(AreIndependent(terms(v, y, 2), terms(v, other_y, 3)));
}

// Against the elements themselves.
TEST(OperandsTest, FindsViewsThatShareElements) {
  std::mt19937_64 random(3);
  std::vector<float> memory(400);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % static_cast<uint64_t>(end)); };
  // Rows of one length, so that columns stay columns.
  const auto view = [&](int64_t stride) {
    const int64_t column = below(stride);
    return MatrixView(memory.data() + below(8) * stride + column, below(4), 1 + below(stride - column), stride);
  };
  const auto elements = [](ConstMatrixView x) {
    std::set<const float*> all;
    for (int64_t i = 0; i < x.rows; ++i) {
      for (int64_t j = 0; j < x.cols; ++j) all.insert(&x.at(i, j));
    }
    return all;
  };
  int shared = 0, apart = 0;
  for (int run = 0; run < 20000; ++run) {
    const int64_t stride = 1 + below(12);
    const bool alike = below(4) != 0;
    const MatrixView x = view(stride), y = view(alike ? stride : 1 + below(12));
    std::set<const float*> both = elements(x);
    const std::set<const float*> of_y = elements(y);
    const size_t all = both.size() + of_y.size();
    both.insert(of_y.begin(), of_y.end());
    const bool overlap = both.size() < all, independent = AreIndependent(Axpby(x, x), Axpby(y, y));
    ASSERT_FALSE(overlap && independent);
    ASSERT_TRUE(overlap || independent || !alike);  // of rows of other lengths it may not be sure
    ++(overlap ? shared : apart);
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(apart, 1000);
}

}  // namespace
}  // namespace precondor
