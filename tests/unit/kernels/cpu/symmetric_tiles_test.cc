// SPDX-License-Identifier: Apache-2.0
// The tile kernels on every instruction set that this machine has, against loops over doubles.
#include "kernels/cpu/symmetric_tiles.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "hwy/targets.h"
#include "kernels/base/random.h"
#include "tests/support/packed_tiles.h"

namespace precondor::tiles {
namespace {

// On one instruction set while it lives.
class OnlyTarget {
 public:
  explicit OnlyTarget(int64_t target) { Choose(target); }
  ~OnlyTarget() { Choose(0); }

 private:
  static void Choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();  // the next call chooses anew
  }
};

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1)
    targets.push_back(left & -left);
  return targets;
}

hwy::AlignedFreeUniquePtr<float[]> Zeros(int64_t count) {
  auto out = hwy::AllocateAligned<float>(static_cast<size_t>(std::max<int64_t>(count, 1)));
  std::fill(out.get(), out.get() + count, 0.0f);
  return out;
}

void Pack(const std::vector<float>& x, const Tiles& m) {
  const std::vector<float> packed = PackedTiles(ConstMatrixView(x.data(), m.n, m.n), m.storage);
  std::memcpy(m.data, packed.data(), packed.size() * sizeof(float));
}

float Uniform(uint64_t seed, uint64_t index) {
  return static_cast<float>(CounterRandom({seed}).Bits(index) >> 40) / (1 << 23) - 1.0f;
}

// A case's inputs, and what comes of them in doubles.
struct Problem {
  Problem(int64_t n, int64_t terms, int64_t vectors) : n(n), terms(terms), vectors(vectors) {
    x.resize(n * n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) x[i * n + j] = x[j * n + i] = Uniform(1, i * n + j);
    }
    const int64_t length = PaddedLength(n);
    left = Zeros(terms * length);
    right = Zeros(terms * length);
    rows.resize(terms * n);
    for (int64_t p = 0; p < terms; ++p) {
      for (int64_t j = 0; j < n; ++j) {
        const float value = rows[p * n + j] = Uniform(2, p * n + j);
        const int64_t at = (j / kTileSide * terms + p) * kTileSide + j % kTileSide;
        right[at] = value;
        left[at] = p % 2 == 0 ? -value : value;
      }
    }
    v = Zeros(vectors * length);
    for (int64_t k = 0; k < vectors; ++k) {
      for (int64_t j = 0; j < n; ++j) v[k * length + j] = Uniform(3, k * n + j);
    }
  }
  Terms All() const { return {left.get(), right.get(), terms}; }
  std::vector<double> Updated(double scale, double shift) const {
    std::vector<double> out(n * n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = scale * x[i * n + j] + (i == j ? shift : 0.0);
        for (int64_t p = 0; p < terms; ++p) {
          sum += (p % 2 == 0 ? -1.0 : 1.0) * static_cast<double>(rows[p * n + i]) * rows[p * n + j];
        }
        out[i * n + j] = sum;
      }
    }
    return out;
  }

  const int64_t n, terms, vectors;
  std::vector<float> x, rows;
  hwy::AlignedFreeUniquePtr<float[]> left, right, v;
};

class TilesOnEveryTarget : public testing::TestWithParam<int64_t> {};

TEST_P(TilesOnEveryTarget, UpdateMultiplyAndExpandFollowTheDefinition) {
  const OnlyTarget only(GetParam());
  for (const SymmetricStorage storage : {SymmetricStorage::kF32, SymmetricStorage::kF16}) {
    for (const int64_t n : {1, 31, 64, 65, 129, 300}) {
      for (const int64_t terms : {0, 1, 8}) {
        const Problem problem(n, terms, 2);
        const int64_t length = PaddedLength(n);
        auto memory = Zeros(TileElements(n)), y = Zeros(2 * length), scratch = Zeros(MultiplyScratch(n, 2));
        const Tiles m{memory.get(), n, storage};
        Pack(problem.x, m);
        UpdateMultiply(0.5f, 0.25, problem.All(), m, problem.v.get(), 2, y.get(), scratch.get());
        std::vector<float> got(n * n);
        Expand(1.0f, 0.0, Terms(), m.data, n, storage, MatrixView(got.data(), n, n));
        const std::vector<double> expected = problem.Updated(0.5, 0.25);
        // f32: each of terms + 1 products and sums, of size up to terms + 1, rounds at 2^-24; f16: two roundings more,
        // at 2^-11 of an element's size.
        const double size = static_cast<double>(terms) + 1;
        const double bound = 2 * size * size * std::ldexp(1.0, -24) +
                             (storage == SymmetricStorage::kF16 ? 2 * size * std::ldexp(1.0, -11) : 0);
        for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], bound) << "n " << n;
        for (int64_t k = 0; k < 2; ++k) {
          for (int64_t i = 0; i < n; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < n; ++j) sum += static_cast<double>(got[i * n + j]) * problem.v[k * length + j];
            const double terms_of_sum = static_cast<double>(n);
            ASSERT_NEAR(y[k * length + i], sum,
                        2 * terms_of_sum * size * std::ldexp(1.0, -24) * std::sqrt(terms_of_sum))
                << "n " << n << " row " << i;
          }
        }
      }
    }
  }
}

TEST_P(TilesOnEveryTarget, DoesNotTouchWhatLiesBehind) {
  const OnlyTarget only(GetParam());
  for (const SymmetricStorage storage : {SymmetricStorage::kF32, SymmetricStorage::kF16}) {
    const int64_t n = 70, floats = TileBytes(n, storage) / 4;
    const Problem problem(n, 3, 1);
    auto memory = Zeros(floats + 64), y = Zeros(PaddedLength(n)), scratch = Zeros(MultiplyScratch(n, 1));
    for (int64_t i = floats; i < floats + 64; ++i) memory[i] = 7.0f;
    const Tiles m{memory.get(), n, storage};
    Pack(problem.x, m);
    UpdateMultiply(0.5f, 0.25, problem.All(), m, problem.v.get(), 1, y.get(), scratch.get());
    for (int64_t i = floats; i < floats + 64; ++i) EXPECT_EQ(memory[i], 7.0f);
  }
}

TEST_P(TilesOnEveryTarget, AMultiplicationOnlyReads) {
  const OnlyTarget only(GetParam());
  const int64_t n = 100;
  const Problem problem(n, 0, 1);
  auto memory = Zeros(TileElements(n)), y = Zeros(PaddedLength(n)), scratch = Zeros(MultiplyScratch(n, 1));
  const Tiles m{memory.get(), n, SymmetricStorage::kF16};
  Pack(problem.x, m);
  const std::vector<float> before(memory.get(), memory.get() + TileBytes(n, m.storage) / 4);
  UpdateMultiply(1.0f, 0.0, Terms(), m, problem.v.get(), 1, y.get(), scratch.get());
  EXPECT_EQ(std::memcmp(before.data(), memory.get(), before.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(All, TilesOnEveryTarget, testing::ValuesIn(Targets()),
                         [](const testing::TestParamInfo<int64_t>& info) {
                           std::string name = hwy::TargetName(info.param);
                           std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

}  // namespace
}  // namespace precondor::tiles
