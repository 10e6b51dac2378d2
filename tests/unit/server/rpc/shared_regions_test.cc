// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/shared_regions.h"

#include <cstring>
#include <future>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "server/core/api/observer.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_plane.h"

namespace precondor::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBlock = DevicePlane::kGranularity;

class SharedRegionsTest : public ::testing::Test {
 protected:
  v1::Ring Request(uint64_t bytes) const {
    v1::Ring request = rings_.Offer();
    request.set_bytes(bytes);
    return request;
  }
  std::shared_ptr<StreamRegion> Open(uint64_t bytes) {
    auto ring = rings_.Open(Request(bytes));
    EXPECT_TRUE(ring.ok()) << ring.status();
    return *std::move(ring);
  }

  // The outcome of StreamRegion::Write.
  absl::Status Write(StreamRegion& region, const wire::Slot& slot, ConstMatrixView answer) {
    std::promise<absl::Status> written;
    region.Write(slot, answer, [&](const absl::Status& outcome) { written.set_value(outcome); });
    return written.get_future().get();
  }

  FakePlane plane_;
  Observer observer_;
  FakeClock clock_;
  NullLogger logger_;
  const std::shared_ptr<MemoryAccount> account_ = std::make_shared<MemoryAccount>(8 * kBlock, observer_);
  SharedRegions rings_{plane_, account_, 4 * kBlock, clock_, logger_};
};

TEST_F(SharedRegionsTest, OffersWhatItGives) {
  EXPECT_EQ(rings_.Offer().kind(), v1::RING_KIND_CUDA);
  EXPECT_EQ(rings_.Offer().device(), plane_.device());
  EXPECT_EQ(rings_.Offer().bytes(), 4u * kBlock);
  const auto ring = Open(1);
  EXPECT_EQ(ring->memory().bytes(), kBlock);
  EXPECT_EQ(Open(100 * kBlock)->memory().bytes(), 4 * kBlock);
}

TEST_F(SharedRegionsTest, RefusesWhatWasNotOffered) {
  for (int wrong = 0; wrong < 3; ++wrong) {
    v1::Ring request = Request(wrong == 0 ? 0 : 1);
    if (wrong == 1) request.set_kind(v1::RING_KIND_UNSPECIFIED);
    if (wrong == 2) request.set_device("another");
    EXPECT_EQ(GetErrorReason(rings_.Open(request).status()), ErrorReason::kMalformed) << wrong;
  }
  EXPECT_EQ(account_->reserved(), 0);
}

TEST_F(SharedRegionsTest, TakesItsMemoryFromWhatSessionsMayReserve) {
  ASSERT_TRUE(account_->Reserve("job", 5 * kBlock).ok());
  const auto ring = Open(3 * kBlock);
  const absl::Status refused = rings_.Open(Request(1)).status();
  EXPECT_EQ(GetErrorReason(refused), ErrorReason::kCapacity);
  EXPECT_EQ(plane_.rings, 1);
  account_->Release(5 * kBlock);
  plane_.refuses = true;
  EXPECT_EQ(rings_.Open(Request(1)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(account_->reserved(), 3 * kBlock) << "what the device refused is not reserved";
}

TEST_F(SharedRegionsTest, FreesARingAtOnceWhenItsWorkerHasUnmappedIt) {
  Open(1)->NoteUnmapped();
  rings_.Collect();
  EXPECT_EQ(plane_.rings, 0);
  EXPECT_EQ(account_->reserved(), 0);
}

TEST_F(SharedRegionsTest, LeavesABrokenStreamsRingToAWorkerThatHasYetToNotice) {
  Open(1);
  rings_.Collect();
  EXPECT_EQ(plane_.rings, 1);
  clock_.Advance(SharedRegions::kLinger);
  rings_.Collect();
  EXPECT_EQ(plane_.rings, 0);
  EXPECT_EQ(account_->reserved(), 0);
}

TEST_F(SharedRegionsTest, KeepsARingForGradientsThatLieInIt) {
  std::shared_ptr<const DevicePayload> payload;
  {
    const auto ring = Open(1);
    ring->NoteUnmapped();
    const auto taken = ring->Take(0, 2, 3);
    ASSERT_TRUE(taken.ok()) << taken.status();
    payload = taken->payload;
  }
  rings_.Collect();
  EXPECT_EQ(plane_.rings, 1);
  payload = nullptr;
  rings_.Collect();
  EXPECT_EQ(plane_.rings, 0);
}

TEST_F(SharedRegionsTest, TakesWhatLiesThereAndWritesTheAnswerThere) {
  const auto ring = Open(1);
  const std::vector<float> gradient = {1, 2, 3, 4, 5, 6}, answer = {6, 5, 4, 3, 2, 1};
  float* const slot = ring->memory().data() + 64;
  std::memcpy(slot, gradient.data(), 24);
  const auto taken = ring->Take(256, 2, 3);
  ASSERT_TRUE(taken.ok()) << taken.status();
  ASSERT_TRUE(ring->Inspect({*taken}).ok());
  EXPECT_EQ(taken->payload->values.data, slot);
  EXPECT_EQ(taken->payload->values.rows, 2);
  EXPECT_TRUE(taken->payload->facts.finite);
  EXPECT_EQ(taken->payload->facts.digest, PayloadDigest(reinterpret_cast<const uint8_t*>(gradient.data()), 6));
  ASSERT_TRUE(Write(*ring, taken->slot, ConstMatrixView(answer.data(), 2, 3)).ok());
  EXPECT_EQ(std::vector<float>(slot, slot + 6), answer);
}

TEST_F(SharedRegionsTest, AnAnswerToAnEarlierUseOfASlotIsNotWritten) {
  const auto ring = Open(1);
  const auto first = ring->Take(0, 1, 1);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(ring->Take(0, 1, 1).ok()) << "it is the shard's";
  ring->GiveBack(first->slot);
  const auto second = ring->Take(0, 1, 1);
  ASSERT_TRUE(second.ok()) << second.status();
  const float answer = 1;
  EXPECT_EQ(Write(*ring, first->slot, ConstMatrixView(&answer, 1, 1)).code(), absl::StatusCode::kFailedPrecondition);
  ring->GiveBack(first->slot);
  EXPECT_TRUE(Write(*ring, second->slot, ConstMatrixView(&answer, 1, 1)).ok());
  EXPECT_EQ(ring->memory().data()[0], answer);
}

TEST_F(SharedRegionsTest, GivesRangesBackThatCannotBeLookedAt) {
  const auto ring = Open(1);
  plane_.refuses = true;
  const std::vector<StreamRegion::Gradient> taken = {ring->Take(0, 1, 1).value(), ring->Take(256, 1, 1).value()};
  EXPECT_EQ(ring->Inspect(taken).code(), absl::StatusCode::kInternal);
  plane_.refuses = false;
  const std::vector<StreamRegion::Gradient> again = {ring->Take(0, 1, 1).value(), ring->Take(256, 1, 1).value()};
  EXPECT_TRUE(ring->Inspect(again).ok());
  EXPECT_THAT(plane_.inspected, ::testing::ElementsAre(2)) << "one wait";
}

TEST(IsOnThisHostTest, KnowsOneKindOfPeer) {
  EXPECT_TRUE(SharedRegions::IsOnThisHost("fd:17"));
  for (const char* peer : {"", "ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:7", "unix:/tmp/s", "unix:fd:1"}) {
    EXPECT_FALSE(SharedRegions::IsOnThisHost(peer)) << peer;
  }
}

}  // namespace
}  // namespace precondor::rpc
