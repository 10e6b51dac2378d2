// SPDX-License-Identifier: Apache-2.0
// Costs and memory of layers, and the room of shards.
#include "server/core/resources/placement_input.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/fake_method.h"

namespace precondor {
namespace {

TEST(PlacementInputTest, ALayersCostIsItsFlops) {
  SessionSpec spec;
  spec.method.name = "fake";
  spec.layers = {{.name = "small", .d_out = 10, .d_in = 10, .has_bias = false},
                 {.name = "large", .d_out = 10, .d_in = 20, .has_bias = false}};
  const auto methods = MethodSet::Make(spec, [](const MethodConfig&) -> absl::StatusOr<std::unique_ptr<Method>> {
    return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
  });
  ASSERT_TRUE(methods.ok()) << methods.status();
  const std::vector<PlacementLayer> layers = EstimateLayers(spec, *methods);
  EXPECT_EQ(layers[0].cost, 100);
  EXPECT_EQ(layers[1].cost, 200);
  EXPECT_GT(layers[1].bytes, layers[0].bytes);
}

}  // namespace
}  // namespace precondor
