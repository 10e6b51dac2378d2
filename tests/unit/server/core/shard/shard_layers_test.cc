// SPDX-License-Identifier: Apache-2.0
// Layers without statistics, and the scratch of a session's layers.
#include "kernels/methods/registry.h"
#include "server/core/resources/reservation.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ShardLayersTest : public ShardFixture {
 protected:
  std::shared_ptr<Reply> SendTo(uint32_t layer, ContributionKind kind, uint64_t step, uint32_t rank, float value) {
    const ContributionHeader header = Header(kind, step, rank, layer);
    return Send(header, Filled(header, value));
  }
};

TEST_F(ShardLayersTest, WithoutStatisticsTheAnswerIsTheAverage) {
  spec.inv_freq = 100;
  spec.warmup_steps = 0;
  options.make_method = MakeMethod;
  spec.method.name = "mkor";
  MakeShard();
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  SendTo(1, ContributionKind::kGradient, 7, 0, 1);
  const auto reply = SendTo(1, ContributionKind::kGradient, 7, 1, 3);
  ASSERT_TRUE(reply->result.has_value() && reply->result->ok());
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_EQ(reply->values(), std::vector<float>(6, 2.0f));
  EXPECT_THAT((*reply->result)->reason, HasSubstr("no factors yet"));
}

TEST_F(ShardLayersTest, ScratchIsEachLayersOwnWhereAllAreAtWorkAtOnce) {
  spec.layers[1].d_out = 30;
  spec.gradient_dtype = DType::kBF16;
  const MethodSet methods = MethodSet::Make(spec, options.make_method).value();
  const auto of = [&](std::vector<uint32_t> layers, int parallelism) {
    return ComputeReservation(spec, methods, layers, options.window_steps, parallelism).scratch;
  };
  const int64_t narrow = of({0}, 1), wide = of({1}, 1);
  EXPECT_GT(wide, narrow);
  EXPECT_EQ(of({0, 1}, 1), wide);
  EXPECT_EQ(of({0, 1}, 2), narrow + wide);
  EXPECT_EQ(of({0, 1}, 512), narrow + wide);
}

}  // namespace
}  // namespace precondor
