// SPDX-License-Identifier: Apache-2.0
#include "server/plane/shard_collective_session.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;

TEST(PlaneBucketsTest, TheLastLayersComeFirstAndLargeOnesAlone) {
  SessionSpec spec;
  for (const int64_t rows : {1024, 1, 2048, 2047, 1, 5000}) spec.layers.push_back({"", rows, 1024, false});
  // In rows of 1024 elements, a bucket has room for 4096.
  EXPECT_THAT(PlaneBuckets(spec, {0, 1, 2, 3, 4, 5}),
              ElementsAre(ElementsAre(5), ElementsAre(4, 3, 2), ElementsAre(1, 0)));
  EXPECT_THAT(PlaneBuckets(spec, {0, 3}), ElementsAre(ElementsAre(3, 0))) << "of those that the shard has";
  EXPECT_THAT(PlaneBuckets(spec, {}), ElementsAre());
}

}  // namespace
}  // namespace precondor
