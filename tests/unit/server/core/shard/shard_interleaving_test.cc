// SPDX-License-Identifier: Apache-2.0
// Calls that other threads make in the middle of a call.
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "tests/support/submit.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

class ShardInterleavingTest : public ShardFixture {
 protected:
  static LayerImage ImageOf(uint32_t layer) {
    LayerImage image;
    image.at = {.session_id = kSession, .layer = layer, .step = 3};
    return image;
  }
};

// Calls back when a removal is recorded.
struct RemovalJournal final : ShardJournal {
  void Append(const ShardRecord& record) override {
    if (std::holds_alternative<RemoveRecord>(record)) on_remove();
  }
  bool AppendGradient(const GradientRecord&) override { return false; }
  void Keep(LayerImage) override {}
  std::function<void()> on_remove;
};

TEST_F(ShardInterleavingTest, ASessionIsInstalledAgainAfterItsRemovalIsRecorded) {
  RemovalJournal journal;
  options.journal = &journal;
  Start();
  journal.on_remove = [&] {
    EXPECT_THAT(shard->Install(MakeInstall()), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("being removed")));
  };
  EXPECT_TRUE(*shard->Remove(kSession));
  EXPECT_TRUE(shard->Install(MakeInstall()).ok());
}

TEST_F(ShardInterleavingTest, ARestoreIsCompleteOnceAllLayersAre) {
  MakeShard();
  SessionInstall install = MakeInstall();
  install.members.clear();  // a session in use is not restored
  ASSERT_TRUE(shard->Install(install).ok());
  const SnapshotOrder order{.session_id = kSession, .number = 1, .restores = true};
  EXPECT_FALSE(shard->snapshots().Take(order)->durable);
  EXPECT_TRUE(shard->snapshots().RestoreLayer(ImageOf(0)).ok());
  log->on_make_state = [&] {
    EXPECT_FALSE(shard->snapshots().Take(order)->durable);
    EXPECT_TRUE(absl::IsUnavailable(shard->snapshots().RestoreLayer(ImageOf(1)))) << "a repetition";
  };
  EXPECT_TRUE(shard->snapshots().RestoreLayer(ImageOf(1)).ok());
  EXPECT_TRUE(shard->snapshots().RestoreLayer(ImageOf(1)).ok()) << "a repetition";
  EXPECT_TRUE(shard->snapshots().Take(order)->durable);
}

TEST_F(ShardInterleavingTest, AnAnswerThatIsLostSinceTheAcknowledgementIsToldAsLost) {
  Start();
  const ContributionHeader header = Header(ContributionKind::kGradient, 5, 1);
  absl::StatusOr<GradientResult> result = absl::UnknownError("none");
  SubmitTo(
      *shard, header, Filled(header, 1),
      [&](const absl::StatusOr<bool>& ack) {
        EXPECT_TRUE(ack.ok());
        Resume(5, 0, 3, 6).IgnoreError();
      },
      [&](absl::StatusOr<GradientResult> got) { result = std::move(got); });
  EXPECT_EQ(GetErrorReason(result.status()), ErrorReason::kStateLost) << result.status();
}

}  // namespace
}  // namespace precondor
