// SPDX-License-Identifier: Apache-2.0
// One factor in both representations against the f64 recursions of tests/reference.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <tuple>

#include "kernels/methods/mkor.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

MkorConfig Config(UpdateRule rule, Representation representation, int64_t rank = 128) {
  MkorConfig config;
  config.rule = rule;
  config.representation = representation;
  config.rank = rank;
  return config;
}

reference::MkorOptions Options(UpdateRule rule) {
  reference::MkorOptions options;
  options.rule = static_cast<reference::Rule>(rule);
  return options;
}

double LargestDifference(const reference::Dense& x, const reference::Dense& y) {
  double largest = 0;
  for (size_t i = 0; i < x.data.size(); ++i) largest = std::max(largest, std::abs(x.data[i] - y.data[i]));
  return largest;
}

void Clamp(double limit, reference::Vectors& vectors) {
  for (reference::Vector& v : vectors) {
    for (double& element : v) element = std::clamp(element, -limit, limit);
  }
}

using Case = std::tuple<UpdateRule, Representation, int64_t, int64_t, Stream>;

class FactorRules : public testing::TestWithParam<Case> {};

// With room for full rank nothing is truncated and only f32 rounding remains. Its size: each update rounds J (or L) at
// eps = 6e-8 of its largest element, what an update leaves decays by gamma, and 1/(1-gamma) = 20 of them add up: about
// 1e-6 of the largest element, 2e-5 with the few products in between and EXACT_DAMPED's amplification by at most
// 1 + d/lambda. PUBLISHED is unstable: a direction, and the error in it, doubles an update until the cap.
TEST_P(FactorRules, FollowsTheRecursionWithinRounding) {
  const auto [rule, representation, d, k, kind] = GetParam();
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  FactorDriver factor(Config(rule, representation), d, *backend);
  reference::MkorFactor oracle(Options(rule), d);
  VectorStream stream(kind, d, 17);
  const double tolerance = rule == UpdateRule::kPublished ? 5e-4 : 2e-5;
  for (int step = 1; step <= 100; ++step) {
    reference::Vectors vectors = stream.Next(k);
    if (rule == UpdateRule::kReference) Clamp(100, vectors);  // the layer's business
    ASSERT_TRUE(factor.Update(vectors).ok());
    oracle.Update(vectors);
    if (step != 1 && step != 2 && step % 50 != 0) continue;
    const reference::Dense expected = oracle.Inverse(), got = factor.Inverse();
    EXPECT_LE(LargestDifference(got, expected), tolerance * LargestElement(expected)) << "update " << step;
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        EXPECT_NEAR(got.at(i, j), got.at(j, i), 1e-6 * LargestElement(got)) << "symmetry at " << i << ", " << j;
      }
    }
    const reference::Vector eigenvalues = reference::SymmetricEigenvalues(got);
    EXPECT_GT(eigenvalues.front(), 0) << "update " << step;
  }
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const char* rules[] = {"Exact", "Reference", "Blend", "Published"};
  const char* streams[] = {"Correlated", "HeavyTailed", "Drifting", "Subspace"};
  const auto [rule, representation, d, k, kind] = info.param;
  return std::string(rules[static_cast<int>(rule)]) + (representation == Representation::kDense ? "Dense" : "LowRank") +
         std::to_string(d) + "Vectors" + std::to_string(k) + streams[static_cast<int>(kind)];
}

INSTANTIATE_TEST_SUITE_P(All, FactorRules,
                         testing::Combine(testing::Values(UpdateRule::kExactDamped, UpdateRule::kReference,
                                                          UpdateRule::kBlend, UpdateRule::kPublished),
                                          testing::Values(Representation::kDense, Representation::kLowRank),
                                          testing::Values(1, 3, 17), testing::Values(1, 4, 16),
                                          testing::Values(Stream::kCorrelated, Stream::kHeavyTailed, Stream::kDrifting,
                                                          Stream::kSubspace)),
                         CaseName);

// A scale of the statistics must not show: J scales by its inverse square, exactly where the scale is a power of two.
class FactorScale : public testing::TestWithParam<std::tuple<UpdateRule, Representation, double>> {};

TEST_P(FactorScale, IsFreeOfTheStatisticsUnits) {
  const auto [rule, representation, scale] = GetParam();
  const int64_t d = 24;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  FactorDriver factor(Config(rule, representation, 8), d, *backend), unit(Config(rule, representation, 8), d, *backend);
  VectorStream stream(Stream::kCorrelated, d, 5);
  for (int step = 0; step < 60; ++step) {
    reference::Vectors vectors = stream.Next(4);
    ASSERT_TRUE(unit.Update(vectors).ok());
    for (reference::Vector& v : vectors) {
      for (double& element : v) element *= scale;
    }
    ASSERT_TRUE(factor.Update(vectors).ok());
  }
  const reference::Dense got = factor.Inverse(), expected = unit.Inverse();
  const double unit_of_inverse = rule == UpdateRule::kExactDamped ? 1.0 / (scale * scale) : 1.0;
  for (size_t i = 0; i < got.data.size(); ++i) {
    EXPECT_NEAR(got.data[i] / unit_of_inverse, expected.data[i], 1e-5 * LargestElement(expected));
  }
}

INSTANTIATE_TEST_SUITE_P(All, FactorScale,
                         testing::Combine(testing::Values(UpdateRule::kExactDamped, UpdateRule::kBlend),
                                          testing::Values(Representation::kDense, Representation::kLowRank),
                                          testing::Values(1e-18, 1e-6, 1e18)));

TEST(FactorTest, VectorsThatAreAllZeroLeaveTheIdentity) {
  for (UpdateRule rule : {UpdateRule::kExactDamped, UpdateRule::kReference, UpdateRule::kBlend}) {
    for (Representation representation : {Representation::kDense, Representation::kLowRank}) {
      const std::unique_ptr<Backend> backend = MakeTestBackend();
      FactorDriver factor(Config(rule, representation), 7, *backend);
      for (int step = 0; step < 3; ++step) ASSERT_TRUE(factor.Update({reference::Vector(7, 0.0)}).ok());
      EXPECT_LE(LargestDifference(factor.Inverse(), reference::Identity(7)), 1e-7);
    }
  }
}

// Zero vectors after others decay L and leave the direction of J alone, whatever their number.
TEST(FactorTest, ZeroVectorsNeverDivideByZero) {
  for (Representation representation : {Representation::kDense, Representation::kLowRank}) {
    const int64_t d = 9;
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    FactorDriver factor(Config(UpdateRule::kExactDamped, representation), d, *backend);
    VectorStream stream(Stream::kCorrelated, d, 3);
    for (int step = 0; step < 20; ++step) ASSERT_TRUE(factor.Update(stream.Next(2)).ok());
    const reference::Vector probe = stream.Gaussian(), before = factor.Apply({probe})[0];
    for (int step = 0; step < 500; ++step) ASSERT_TRUE(factor.Update({reference::Vector(d, 0.0)}).ok());
    const reference::Vector after = factor.Apply({probe})[0];
    reference::Vector scaled = after;
    for (double& element : scaled) element *= Norm(before) / Norm(after);
    EXPECT_LE(RelativeDifference(scaled, before), 1e-4);
  }
}

// More vectors in one step than the factor has columns.
TEST(FactorTest, TakesMoreVectorsThanColumns) {
  for (UpdateRule rule : {UpdateRule::kExactDamped, UpdateRule::kReference, UpdateRule::kBlend}) {
    const int64_t d = 20;
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    FactorDriver factor(Config(rule, Representation::kLowRank, 6), d, *backend);
    reference::MkorFactor oracle(Options(rule), d);
    VectorStream stream(Stream::kSubspace, d, 11);  // five dimensions: six columns hold all there is
    for (int step = 0; step < 40; ++step) {
      const reference::Vectors vectors = stream.Next(50);
      ASSERT_TRUE(factor.Update(vectors).ok());
      oracle.Update(vectors);
    }
    EXPECT_LE(factor.factor().rank(), 6);
    EXPECT_LE(LargestDifference(factor.Inverse(), oracle.Inverse()), 1e-4 * LargestElement(oracle.Inverse()));
  }
}

// The bound of truncation's error: the dropped part T of L is replaced by tr(T)/d I, so that |J - J'| <= |J| |J'| |T|
// <= tr(T) / mu^2 in J's units, and tr(T) shows in the damping. J' stays positive definite and at most 1/mu.
TEST(FactorTest, TruncationErrorIsBoundedByTheDroppedTrace) {
  const int64_t d = 40;
  for (int64_t rank : {2, 8, 16}) {
    for (Stream kind : {Stream::kCorrelated, Stream::kHeavyTailed, Stream::kDrifting}) {
      const std::unique_ptr<Backend> backend = MakeTestBackend();
      FactorDriver factor(Config(UpdateRule::kExactDamped, Representation::kLowRank, rank), d, *backend);
      reference::MkorFactor oracle(Options(UpdateRule::kExactDamped), d);
      VectorStream stream(kind, d, 23);
      for (int step = 0; step < 100; ++step) {
        const reference::Vectors vectors = stream.Next(4);
        ASSERT_TRUE(factor.Update(vectors).ok());
        oracle.Update(vectors);
      }
      const double mu = oracle.Damping(), dropped = (factor.factor().damping() - mu) * static_cast<double>(d);
      EXPECT_GE(dropped, 0);
      const reference::Dense got = factor.Inverse(), expected = oracle.Inverse();
      reference::Dense difference = got;
      for (size_t i = 0; i < got.data.size(); ++i) difference.data[i] -= expected.data[i];
      const reference::Vector errors = reference::SymmetricEigenvalues(difference);
      EXPECT_LE(std::max(std::abs(errors.front()), std::abs(errors.back())), dropped / (mu * mu));
      const reference::Vector eigenvalues = reference::SymmetricEigenvalues(got);
      EXPECT_GT(eigenvalues.front(), 0);
      EXPECT_LE(eigenvalues.back(), (1 + 1e-5) / mu);
    }
  }
}

// Up to d = 4 r the core is inverted once for all gradients between two updates. Where it is taken from its packed form
// or made anew, bits are the same: a state that is loaded has to make it.
TEST(FactorTest, AShortFactorKeepsItsCoreUntilItChanges) {
  for (const int64_t d : {3, 20, 21}) {
    SCOPED_TRACE(d);
    const bool keeps = d <= 20;
    const MkorConfig config = Config(UpdateRule::kExactDamped, Representation::kLowRank, 5);
    const std::unique_ptr<Backend> cpu = MakeTestBackend();
    FaultyBackend backend(*cpu);
    FactorDriver factor(config, d, backend);
    VectorStream stream(Stream::kCorrelated, d, 3);
    for (int step = 0; step < 12; ++step) {
      ASSERT_TRUE(factor.Update(stream.Next(2)).ok());
      backend.RefuseInverses(true);
      EXPECT_FALSE(factor.factor().Inverse().ok()) << "that of the factor before the update";
      backend.RefuseInverses(false);
      const reference::Dense made = factor.Inverse();
      backend.RefuseInverses(keeps);
      EXPECT_EQ(factor.Inverse().data, made.data);
      // An update that comes to nothing leaves it.
      const DeviceMatrix vectors = ToDevice(*cpu, stream.Next(2));
      ASSERT_TRUE(factor.factor().Prepare(vectors.view()).ok());
      factor.factor().Abandon();
      EXPECT_EQ(factor.Inverse().data, made.data);
      backend.RefuseInverses(false);
      StateWriter out("factor");
      ASSERT_TRUE(factor.factor().Save(out).ok());
      FactorDriver other(config, d, backend);
      ASSERT_TRUE(other.Update(stream.Next(1)).ok());
      EXPECT_NE(other.Inverse().data, made.data);
      const std::string bytes = out.Finish();
      StateReader in(bytes);
      ASSERT_TRUE(in.Begin("factor").ok());
      ASSERT_TRUE(other.factor().PrepareLoad(in).ok());
      other.factor().Commit();
      EXPECT_EQ(other.Inverse().data, made.data);
    }
  }
}

// One vector a step at gamma .85: the last of 64 weighs 5e-6 of them all, and goes as the next one comes. What that
// costs is bounded as in TruncationErrorIsBoundedByTheDroppedTrace, with tr(T) <= gamma^63 tr(L) = 3.6e-5 d mu for
// lambda = 1; f32's 2e-5 is beside it.
MkorConfig SlidingWindow() {
  MkorConfig config = Config(UpdateRule::kExactDamped, Representation::kLowRank, 64);
  config.gamma = 0.85;
  return config;
}

TEST(FactorTest, AWindowSlidesInPlace) {
  const int64_t d = 96, rank = 64;
  const std::unique_ptr<Backend> cpu = MakeTestBackend();
  FaultyBackend backend(*cpu);
  FactorDriver factor(SlidingWindow(), d, backend);
  reference::MkorOptions options = Options(UpdateRule::kExactDamped);
  options.gamma = 0.85;
  reference::MkorFactor oracle(options, d);
  VectorStream stream(Stream::kDrifting, d, 5);
  for (int step = 1; step <= 3 * rank; ++step) {
    const reference::Vectors vectors = stream.Next(1);
    backend.ResetPeak();
    ASSERT_TRUE(factor.Update(vectors).ok());
    oracle.Update(vectors);
    const int64_t scratch = backend.peak_bytes() - backend.allocated_bytes();
    EXPECT_LE(scratch, static_cast<int64_t>(sizeof(float)) * (2 * d + rank)) << "no copy of the window";
    EXPECT_EQ(factor.factor().rank(), std::min<int64_t>(step, rank));
    if (step % 32 != 0) continue;
    const reference::Dense expected = oracle.Inverse(), got = factor.Inverse();
    const double mu = oracle.Damping(), dropped = 3.6e-5 * static_cast<double>(d) * mu;
    EXPECT_LE(LargestDifference(got, expected), dropped / (mu * mu) + 2e-5 * LargestElement(expected));
  }
}

// Rows are written before anyone knows that they will be adopted: where J looks at them this shows.
TEST(FactorTest, AnAbandonedUpdateLeavesASlidingWindowAsItWas) {
  const int64_t d = 96;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  FactorDriver factor(SlidingWindow(), d, *backend), other(SlidingWindow(), d, *backend);
  VectorStream stream(Stream::kCorrelated, d, 5), unwanted(Stream::kHeavyTailed, d, 6);
  for (int step = 0; step < 150; ++step) {
    const DeviceMatrix never = ToDevice(*backend, unwanted.Next(1 + step % 3));
    ASSERT_TRUE(factor.factor().Prepare(never.view()).ok());
    factor.factor().Abandon();
    const reference::Vectors vectors = stream.Next(1);
    ASSERT_TRUE(factor.Update(vectors).ok());
    ASSERT_TRUE(other.Update(vectors).ok());
    if (step % 10 == 9) {
      ASSERT_EQ(factor.Inverse().data, other.Inverse().data) << "step " << step;
    }
  }
}

TEST(FactorTest, ASlidingWindowGoesOnFromItsSavedStateBitwise) {
  const int64_t d = 96;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  FactorDriver factor(SlidingWindow(), d, *backend), loaded(SlidingWindow(), d, *backend);
  VectorStream stream(Stream::kCorrelated, d, 5);
  for (int step = 0; step < 100; ++step) ASSERT_TRUE(factor.Update(stream.Next(1)).ok());
  StateWriter out("factor", 1 << 16);
  ASSERT_TRUE(factor.factor().Save(out).ok());
  const std::string bytes = out.Finish();
  StateReader in(bytes);
  ASSERT_TRUE(in.Begin("factor").ok());
  ASSERT_TRUE(loaded.factor().PrepareLoad(in).ok());
  loaded.factor().Commit();
  for (int step = 0; step < 30; ++step) {
    const reference::Vectors vectors = stream.Next(1 + step % 2);
    ASSERT_TRUE(factor.Update(vectors).ok());
    ASSERT_TRUE(loaded.Update(vectors).ok());
    ASSERT_EQ(factor.Inverse().data, loaded.Inverse().data) << "step " << step;
  }
}

// Factors that began together would otherwise all recompress at the same steps.
TEST(FactorTest, FactorsOfDifferentPhaseRecompressAtDifferentSteps) {
  const MkorConfig config = Config(UpdateRule::kExactDamped, Representation::kLowRank, 64);
  const int64_t d = 96, k = 4, steps = 64 / 4 / k;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  std::map<int, int> recompressions;  // by step: the rank fell
  for (uint64_t phase = 0; phase < steps; ++phase) {
    const std::unique_ptr<Factor> factor = MakeFactor(config, d, phase, *backend).value();
    VectorStream stream(Stream::kCorrelated, d, 7);
    for (int step = 0; step < 48; ++step) {
      const int64_t before = factor->rank();
      ASSERT_TRUE(factor->Prepare(ToDevice(*backend, stream.Next(k)).view()).ok());
      ASSERT_TRUE(factor->Conclude().ok());
      factor->Commit();
      if (factor->rank() <= before) ++recompressions[step];
    }
  }
  recompressions.erase(recompressions.begin());  // the first: all are full
  ASSERT_GE(recompressions.size(), 20u);
  for (const auto& [step, count] : recompressions) EXPECT_EQ(count, 1) << "step " << step;
}

// BERT-Large: 96 layers of 1024 x 1024, 24 of 4096 x 1024 and 24 of 1024 x 4096; the Gram matrices are 4 % beside the
// vectors, and S, kept for the narrow sides, as much beside theirs.
TEST(FactorTest, LowRankStateIsLittleMoreThanItsVectors) {
  const MkorConfig config = Config(UpdateRule::kExactDamped, Representation::kLowRank, 128);
  const int64_t narrow = 2 * 96 + 24 + 24, wide = 24 + 24;
  const int64_t bytes = narrow * FactorStateBytes(config, 1024) + wide * FactorStateBytes(config, 4096);
  const int64_t vectors = (narrow * 1024 + wide * 4096) * 128 * 4;
  EXPECT_LE(static_cast<double>(bytes), 1.09 * static_cast<double>(vectors));
}

}  // namespace
}  // namespace precondor
