// SPDX-License-Identifier: Apache-2.0
// A shard's use of its device's memory, and its answers when the device fails.
#include <utility>
#include <vector>

#include "kernels/methods/registry.h"
#include "tests/support/faulty_backend.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;

struct MemoryObserver final : Observer {
  void OnReservedBytes(int64_t reserved, int64_t capacity) override { bytes = {reserved, capacity}; }
  void OnDevice(absl::string_view device, bool usable) override { usables.emplace_back(device, usable); }
  std::pair<int64_t, int64_t> bytes;
  std::vector<std::pair<std::string, bool>> usables;  // in the order in which it heard
};

class ShardMemoryTest : public ShardFixture {
 protected:
  ShardMemoryTest() {
    options.make_method = MakeMethod;
    options.device_name = "test:1";
    spec.method = {.name = "mkor", .options = {}};
    spec.layers.clear();
    for (int64_t i = 0; i < 5; ++i) {
      spec.layers.push_back(
          {.name = std::string(1, static_cast<char>('a' + i)), .d_out = 12 + 3 * i, .d_in = 40 - i, .has_bias = false});
    }
    shard = std::make_unique<Shard>(options, faulty_, executor, clock, logger, seen_);
  }
  ~ShardMemoryTest() override { shard = nullptr; }

  void ExpectStep(uint64_t step, Decision decision, uint64_t version) {
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
      std::shared_ptr<Reply> reply;
      for (const ContributionKind kind : {ContributionKind::kStatistics, ContributionKind::kGradient}) {
        for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
          const ContributionHeader header = Header(kind, step, rank, layer);
          reply = Send(header, Distinct(header));
          EXPECT_TRUE(reply->accepted()) << reply->ack->status();
        }
      }
      EXPECT_EQ(reply->decision(), decision) << layer << ": " << reply->answer().reason;
      EXPECT_EQ(reply->version(), version) << layer;
    }
  }

  FaultyBackend faulty_{*backend};
  MemoryObserver seen_;
};

// gRPC frees an answer's memory when it has sent it, which may be after the server's end.
TEST_F(ShardMemoryTest, AnAnswerToAFetchMayOutliveTheBackend) {
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  ExpectStep(0, Decision::kPreconditioned, 1);
  std::optional<GradientResult> answer;
  shard->data_plane().Fetch(Header(ContributionKind::kPull, 0, 0).key,
                            [&](const absl::StatusOr<GradientResult>& result) { answer = result.value(); });
  ASSERT_NE(answer->bytes, nullptr);
  shard = nullptr;
  const int trims = faulty_.trims();
  answer = std::nullopt;
  EXPECT_EQ(faulty_.trims(), trims);
}

TEST_F(ShardMemoryTest, UsesAtMostWhatItReservesAndGivesItBack) {
  EXPECT_EQ(seen_.bytes, std::pair(int64_t{0}, options.capacity_bytes));
  const int64_t bytes = shard->Install(MakeInstall()).value();
  EXPECT_EQ(seen_.bytes, std::pair(bytes, options.capacity_bytes));
  for (uint64_t step = 0; step < 6; ++step) ExpectStep(step, Decision::kPreconditioned, step + 1);
  EXPECT_GT(faulty_.peak_bytes(), 0);
  EXPECT_LE(faulty_.peak_bytes(), bytes);
  ASSERT_TRUE(*shard->Remove(kSession));
  EXPECT_EQ(seen_.bytes.first, 0);
  EXPECT_EQ(faulty_.allocated_bytes(), 0);
}

TEST_F(ShardMemoryTest, ALostDeviceIsReportedOnceAndAnswersIdentity) {
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  ExpectStep(0, Decision::kPreconditioned, 1);
  EXPECT_FALSE(shard->upkeep().LostDevice());
  EXPECT_THAT(seen_.usables, ElementsAre(std::pair("test:1", true)));
  faulty_.FailAlways();
  ExpectStep(1, Decision::kIdentity, 1);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(shard->upkeep().LostDevice());
  EXPECT_THAT(seen_.usables, ElementsAre(std::pair("test:1", true), std::pair("test:1", false)));
  EXPECT_EQ(shard->Describe()->device.name, "test:1");
  EXPECT_EQ(shard->Describe()->device.fault, "injected fault");
}

}  // namespace
}  // namespace precondor
