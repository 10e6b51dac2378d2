// SPDX-License-Identifier: Apache-2.0
// Dense factors whose terms wait beside tiles: where the matrix has several tiles, in both storages, and across saves.
#include "kernels/methods/deferred_factor.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <string>
#include <tuple>

#include "tests/support/faulty_backend.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

MkorConfig Config(UpdateRule rule, SymmetricStorage storage = SymmetricStorage::kF32) {
  MkorConfig config;
  config.rule = rule;
  config.representation = Representation::kDense;
  config.storage = storage;
  return config;
}

reference::MkorFactor Oracle(UpdateRule rule, int64_t d) {
  reference::MkorOptions options;
  options.rule = static_cast<reference::Rule>(rule);
  return reference::MkorFactor(options, d);
}

std::string Saved(const Factor& factor) {
  StateWriter out("test");
  EXPECT_TRUE(factor.Save(out).ok());
  return out.Finish();
}

absl::Status Load(const std::string& bytes, Factor& factor) {
  StateReader in(bytes);
  absl::Status status = in.Begin("test");
  if (status.ok()) status = factor.PrepareLoad(in);
  if (status.ok()) status = in.Finish();
  status.ok() ? factor.Commit() : factor.Abandon();
  return status;
}

// |G J - G J'| / |G J'| over a few rows G.
double ErrorOfProducts(FactorDriver& factor, const reference::MkorFactor& oracle, VectorStream& stream) {
  const reference::Dense expected = oracle.Inverse();
  const reference::Vectors probes = {stream.Gaussian(), stream.Gaussian(), stream.Gaussian()};
  const reference::Vectors got = factor.Apply(probes);
  double worst = 0;
  for (size_t i = 0; i < probes.size(); ++i) {
    reference::Dense row(1, expected.rows);
    row.data = probes[i];
    worst = std::max(worst, RelativeDifference(got[i], reference::Product(row, expected).data));
  }
  return worst;
}

using Case = std::tuple<UpdateRule, SymmetricStorage, int64_t>;

class DeferredFactorRules : public testing::TestWithParam<Case> {};

// f32 as in FactorRules. f16: elements of J - e I are rounded at 2^-11 of their size, which costs J G that times
// |J - e I| / |J|. A few vectors a step leave J near a multiple of the identity: 1e-4 was asked for. Where a step's
// vectors times their lifetime, 20 steps, outnumber d, nothing but the rounding of an element itself can be promised.
TEST_P(DeferredFactorRules, FollowsTheRecursionAcrossTiles) {
  const auto [rule, storage, k] = GetParam();
  const int64_t d = 150;
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  FactorDriver factor(Config(rule, storage), d, *backend);
  reference::MkorFactor oracle = Oracle(rule, d);
  VectorStream stream(Stream::kCorrelated, d, 17);
  for (int step = 1; step <= 40; ++step) {
    const reference::Vectors vectors = stream.Next(k);
    ASSERT_TRUE(factor.Update(vectors).ok());
    oracle.Update(vectors);
    if (step % 13 != 0) continue;
    const double half = 20 * k < d ? 1e-4 : std::ldexp(1.0, -11);
    EXPECT_LE(ErrorOfProducts(factor, oracle, stream), storage == SymmetricStorage::kF32 ? 5e-6 : half) << step;
  }
}

INSTANTIATE_TEST_SUITE_P(F32, DeferredFactorRules,
                         testing::Combine(testing::Values(UpdateRule::kReference, UpdateRule::kBlend),
                                          testing::Values(SymmetricStorage::kF32), testing::Values(1, 3, 16, 40)));
INSTANTIATE_TEST_SUITE_P(F16, DeferredFactorRules,
                         testing::Combine(testing::Values(UpdateRule::kReference, UpdateRule::kBlend),
                                          testing::Values(SymmetricStorage::kF16), testing::Values(1, 3, 16, 40)));

TEST(DeferredFactorTest, F16TakesHalfTheTiles) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const int64_t d : {1, 150, 1024}) {
    const std::unique_ptr<Factor> factor =
        MakeFactor(Config(UpdateRule::kBlend, SymmetricStorage::kF16), d, 0, *backend).value();
    EXPECT_EQ(backend->allocated_bytes(), factor->bytes());
    EXPECT_EQ(factor->bytes(), TileElements(d) * 2 + DeferredFactor::kDeferred * d * 4);
  }
}

// Wherever between two moves into M it is taken.
TEST(DeferredFactorTest, ASavedFactorGoesOnBitwise) {
  const int64_t d = 70;
  for (const UpdateRule rule : {UpdateRule::kReference, UpdateRule::kBlend, UpdateRule::kPublished}) {
    for (const int before : {0, 1, 5, 9, 16, 17, 33}) {
      const std::unique_ptr<Backend> backend = MakeTestBackend();
      FactorDriver factor(Config(rule), d, *backend), other(Config(rule), d, *backend);
      VectorStream stream(Stream::kCorrelated, d, 31);
      for (int step = 0; step < before; ++step) ASSERT_TRUE(factor.Update(stream.Next(1)).ok());
      const absl::Status loaded = Load(Saved(factor.factor()), other.factor());
      ASSERT_TRUE(loaded.ok()) << loaded;
      for (int step = 0; step < 20; ++step) {
        EXPECT_EQ(Saved(other.factor()), Saved(factor.factor()));
        const reference::Vectors vectors = stream.Next(1 + step % 3);
        ASSERT_TRUE(factor.Update(vectors).ok());
        ASSERT_TRUE(other.Update(vectors).ok());
      }
      EXPECT_EQ(other.Inverse().data, factor.Inverse().data);
    }
  }
}

// An update that fails may have moved terms into M; repeated, it gives the bits of one that never failed.
TEST(DeferredFactorTest, AFailedUpdateLeavesTheNextOnesBitsAlone) {
  const int64_t d = 70;
  for (const UpdateRule rule : {UpdateRule::kReference, UpdateRule::kBlend, UpdateRule::kPublished}) {
    const std::unique_ptr<Backend> cpu = MakeTestBackend();
    FaultyBackend backend(*cpu);
    FactorDriver failing(Config(rule), d, backend), healthy(Config(rule), d, backend);
    VectorStream stream(Stream::kCorrelated, d, 31);
    for (int step = 0; step < 12; ++step) {
      const reference::Vectors vectors = stream.Next(3);
      ASSERT_TRUE(healthy.Update(vectors).ok());
      const DeviceMatrix device = ToDevice(backend, vectors);
      const reference::Dense before = failing.Inverse();
      for (int64_t fault = 0;; ++fault) {
        backend.FailAt(fault);
        const absl::Status status = failing.factor().Prepare(device.view());
        backend.NeverFail();
        if (status.ok()) break;
        failing.factor().Abandon();
        ASSERT_EQ(failing.Inverse().data, before.data) << fault;
      }
      ASSERT_TRUE(failing.factor().Conclude().ok());
      failing.factor().Commit();
      ASSERT_EQ(Saved(failing.factor()), Saved(healthy.factor())) << step;
    }
  }
}

// An update that would leave no inverse is refused, however many vectors it has: here of a J that is none.
TEST(DeferredFactorTest, RefusesAnUpdateThatLeavesAWrongDiagonal) {
  const int64_t d = 70;
  for (const int64_t k : {1, 3, 16, 17, 40}) {
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    FactorDriver factor(Config(UpdateRule::kBlend), d, *backend);
    const SymmetricMatrix zero = backend->AllocateSymmetric(d, SymmetricStorage::kF32).value();
    StateWriter out("test");
    out.Text("tiles");
    out.Integer(d);
    RuleScalars().Write(out);
    out.Number(-2);  // identity
    out.Number(1);   // scale
    out.Numbers({});
    out.Numbers(std::vector<double>(d, -2.0));  // diagonal
    ASSERT_TRUE(out.Matrix(*backend, ConstMatrixView(nullptr, 0, d)).ok());
    ASSERT_TRUE(out.Matrix(*backend, zero.raw()).ok());
    const absl::Status loaded = Load(out.Finish(), factor.factor());
    ASSERT_TRUE(loaded.ok()) << loaded;
    VectorStream stream(Stream::kCorrelated, d, 31);
    EXPECT_TRUE(absl::IsFailedPrecondition(factor.Update(stream.Next(k)))) << k;
  }
}

TEST(DeferredFactorTest, RefusesAnotherRepresentationsBytes) {
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  FactorDriver factor(Config(UpdateRule::kBlend), 9, *backend), longer(Config(UpdateRule::kBlend), 10, *backend);
  StateWriter out("test");
  out.Text("low_rank");
  const absl::Status refused = Load(out.Finish(), factor.factor());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_NE(refused.message().find("representation: expected \"tiles\", got \"low_rank\""), std::string::npos);
  EXPECT_TRUE(absl::IsFailedPrecondition(Load(Saved(longer.factor()), factor.factor())));
}

}  // namespace
}  // namespace precondor
