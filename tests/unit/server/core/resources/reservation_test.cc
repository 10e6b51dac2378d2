// SPDX-License-Identifier: Apache-2.0
// Costs and memory of layers, and the memory of a shard.
#include "server/core/resources/reservation.h"

#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "server/core/resources/memory_account.h"
#include "tests/support/fake_method.h"

namespace precondor {
namespace {

class ReservationTest : public testing::Test {
 protected:
  static SessionSpec TwoLayers() {
    SessionSpec spec;
    spec.method.name = "fake";
    spec.gradient_dtype = DType::kBF16;
    spec.layers = {{.name = "small", .d_out = 10, .d_in = 10, .has_bias = false},
                   {.name = "large", .d_out = 10, .d_in = 20, .has_bias = false}};
    return spec;
  }
  const SessionSpec spec = TwoLayers();
  static MethodSet MethodsOf(const SessionSpec& spec) {
    return MethodSet::Make(spec,
                           [](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
                             return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
                           })
        .value();
  }
  const MethodSet methods = MethodsOf(spec);
};

TEST_F(ReservationTest, ALayersCostIsItsFlops) {
  const std::vector<PlacementLayer> layers = EstimateLayers(spec, methods);
  EXPECT_EQ(layers[0].cost, 100);
  EXPECT_EQ(layers[1].cost, 200);
  EXPECT_GT(layers[1].bytes, layers[0].bytes);
}

TEST_F(ReservationTest, ScratchIsEachLayersOwnWhereAllAreAtWorkAtOnce) {
  const auto of = [&](std::vector<uint32_t> layers, int parallelism) {
    return ComputeReservation(spec, methods, layers, /*window_steps=*/2, parallelism).scratch;
  };
  const int64_t narrow = of({0}, 1), wide = of({1}, 1);
  EXPECT_GT(wide, narrow);
  EXPECT_EQ(of({0, 1}, 1), wide);
  EXPECT_EQ(of({0, 1}, 2), narrow + wide);
  EXPECT_EQ(of({0, 1}, 512), narrow + wide);
}

TEST_F(ReservationTest, FewerLayersRunAtOnceWhereMemoryIsShort) {
  SessionSpec large = spec;
  large.layers.resize(100, large.layers[1]);
  const MethodSet of_large = MethodsOf(large);
  std::vector<uint32_t> layers(large.layers.size());
  std::iota(layers.begin(), layers.end(), 0);
  const auto with = [&](int64_t free) {
    return ComputeReservation(large, of_large, layers, 2, /*parallelism=*/512, free);
  };
  const Reservation all = with(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(all.at_once, 512);
  EXPECT_EQ(with(all.total()).total(), all.total());
  const Reservation half = with(all.total() - all.scratch / 3);
  EXPECT_EQ(half.at_once, 50);
  EXPECT_EQ(half.states + half.staging, all.states + all.staging);
  EXPECT_LE(half.total(), all.total() - all.scratch / 3);
  const Reservation fewest = with(0);
  EXPECT_EQ(fewest.at_once, kFewestAtOnce);
  EXPECT_EQ(fewest.scratch, ComputeReservation(large, of_large, layers, 2, kFewestAtOnce).scratch);
  EXPECT_EQ(ComputeReservation(large, of_large, layers, 2, /*parallelism=*/4, 0).at_once, 4);
}

TEST(MemoryAccountTest, AdmitsUpToTheLastByteAndNamesTheNumbers) {
  Observer observer;
  MemoryAccount account(100, observer);
  ASSERT_TRUE(account.Reserve("a", 40).ok());
  for (const int64_t bytes : {int64_t{61}, std::numeric_limits<int64_t>::max()}) {
    const absl::Status refused = account.Reserve("b", bytes);
    EXPECT_EQ(GetErrorReason(refused), ErrorReason::kCapacity);
    EXPECT_EQ(refused.message(),
              absl::StrCat("session \"b\" does not fit: needed ", bytes, " bytes, reserved 40 of capacity 100"));
  }
  ASSERT_TRUE(account.Reserve("b", 60).ok());
  ASSERT_TRUE(account.Reserve("c", 0).ok());
  EXPECT_EQ(account.reserved(), 100);
}

}  // namespace
}  // namespace precondor
