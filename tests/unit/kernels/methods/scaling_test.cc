// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/scaling.h"

#include <gtest/gtest.h>

#include "tests/support/method_driver.h"

namespace precondor {
namespace {

class ScalingTest : public testing::Test {
 protected:
  // u after Rescale, with the given factor.
  absl::StatusOr<reference::Vector> Scaled(const reference::Vector& d, const reference::Vector& u, double factor) {
    const DeviceMatrix device_d = ToDevice(*backend_, {{d[0], d[1]}, {d[2], d[3]}});
    DeviceMatrix device_u = ToDevice(*backend_, {{u[0], u[1]}, {u[2], u[3]}});
    const absl::Status status = Rescale(policy_, layer_, *backend_, factor, device_d.view(), device_u.view());
    if (!status.ok()) return status;
    const reference::Vectors rows = ToHost(*backend_, device_u.view());
    return reference::Vector{rows[0][0], rows[0][1], rows[1][0], rows[1][1]};
  }

  const std::unique_ptr<Backend> backend_ = MakeTestBackend();
  ScalingPolicy policy_;
  LayerSpec layer_{"layer", 2, 2, true};
};

TEST_F(ScalingTest, NormRescaleGivesTheJointNorm) {
  const auto u = Scaled({3, 0, 0, 4}, {1, 1, 1, 1}, 7.0);
  ASSERT_TRUE(u.ok());
  for (double element : *u) EXPECT_NEAR(element, 2.5, 1e-6);  // |d| = 5, |u| = 2
}

TEST_F(ScalingTest, SeparateBiasSumsTheNormsOfWeightAndBias) {
  policy_.separate_bias = true;
  // Weight column (3, 4), bias column (12, 5): 5 + 13 against 2 + 2 for u.
  const auto u = Scaled({3, 12, 4, 5}, {0, 2, 2, 0}, 1.0);
  ASSERT_TRUE(u.ok());
  EXPECT_NEAR((*u)[1], 2 * 18.0 / 4.0, 1e-5);
  layer_.has_bias = false;
  const auto joint = Scaled({3, 12, 4, 5}, {0, 2, 2, 0}, 1.0);
  EXPECT_NEAR((*joint)[1], 2 * std::sqrt(194.0) / std::sqrt(8.0), 1e-5);
}

TEST_F(ScalingTest, AZeroGradientStaysZero) {
  const auto u = Scaled({0, 0, 0, 0}, {0, 0, 0, 0}, 1.0);
  ASSERT_TRUE(u.ok());
  EXPECT_EQ(*u, reference::Vector(4, 0.0));
}

TEST_F(ScalingTest, NonFiniteGradientsAreRefused) {
  for (double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    for (Scaling scaling : {Scaling::kNormRescale, Scaling::kKlClip, Scaling::kRmsClip, Scaling::kNone}) {
      policy_.kind = scaling;
      EXPECT_EQ(Scaled({1, bad, 0, 0}, {1, bad, 0, 0}, 1.0).status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST_F(ScalingTest, RmsClipBoundsTheRootMeanSquareOnly) {
  policy_.kind = Scaling::kRmsClip;
  policy_.clip = 1.5;
  EXPECT_NEAR((*Scaled({1, 1, 1, 1}, {1, 1, 1, 1}, 4.0))[0], 1.5, 1e-6);
  EXPECT_NEAR((*Scaled({1, 1, 1, 1}, {1, 1, 1, 1}, 0.5))[0], 0.5, 1e-6);
}

TEST_F(ScalingTest, NoneAndKlClipGiveU) {
  for (Scaling scaling : {Scaling::kNone, Scaling::kKlClip}) {
    policy_.kind = scaling;
    EXPECT_NEAR((*Scaled({1, 1, 1, 1}, {1, 2, 3, 4}, 0.25))[3], 1.0, 1e-6);
  }
}

// Factors beyond f32 are fine when the result is within, and an error when it is not.
TEST_F(ScalingTest, ScalesBeyondF32AreExactOrRefused) {
  policy_.kind = Scaling::kNone;
  EXPECT_NEAR((*Scaled({1, 1, 1, 1}, {1e-30, 0, 0, 0}, 1e42))[0], 1e12, 1e6);
  const absl::Status status = Scaled({1, 1, 1, 1}, {1, 0, 0, 0}, 1e72).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  policy_.kind = Scaling::kNormRescale;
  EXPECT_NEAR((*Scaled({1e20, 0, 0, 0}, {1e-20, 0, 0, 0}, 1e72))[0], 1e20, 1e14);
}

}  // namespace
}  // namespace precondor
