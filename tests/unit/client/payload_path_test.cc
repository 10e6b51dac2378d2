// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/payload_path.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/fake_plane.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSlot = 256;
constexpr uint64_t kBytes = 48;

// Notes what came out of a slot.
class SlotSink final : public AnswerSink {
 public:
  absl::Status Begin(absl::Span<const wire::TensorFormat>, uint64_t) override { return absl::OkStatus(); }
  absl::Status Append(uint64_t, const wire::ReceivedBytes&) override { return absl::OkStatus(); }
  bool HasAllBytes() const override { return false; }
  void TakeFromSlot(const float* values, size_t outstanding, std::function<void(const absl::Status&)> done) override {
    taken = values;
    others = outstanding - 1;
    done(absl::OkStatus());
  }
  void Restart() override {}
  bool Complete(Preconditioned) override { return true; }
  bool Fail(absl::Status) override { return true; }
  bool ready() const override { return false; }

  const float* taken = nullptr;
  size_t others = 0;
};

class PayloadPathTest : public ::testing::Test {
 protected:
  PayloadPathTest() {
    plane_->maps = true;
    OpenStream();
  }
  void OpenStream() {
    v1::ExchangeResponse credit;
    v1::Ring* const offer = credit.add_ring_offers();
    offer->set_kind(v1::RING_KIND_CUDA);
    offer->set_device(plane_->device());
    offer->set_bytes(2 * kSlot);  // the most
    path_.OnStreamOpen(credit);
  }
  // Does the work of a link and its shard when there is something to write.
  void Write() {
    const std::optional<v1::Ring> request = path_.TakeRequest();
    ASSERT_TRUE(request.has_value());
    ++requests_;
    v1::Ring granted = *request;
    if (grants_device_.has_value()) granted.set_device(*grants_device_);
    refuses_.ok() ? path_.OnGranted(granted) : path_.OnRefused(refuses_);
  }
  absl::StatusOr<PayloadPath::Place> Take(uint32_t layer) {
    return path_.TakeSlot(
        plane_, [] { return 10 * kSlot; }, layer, kBytes, absl::InfiniteFuture());
  }
  // A gradient of the layer in a slot.
  std::shared_ptr<Contribution> Gradient(uint32_t layer) {
    const absl::StatusOr<PayloadPath::Place> place = Take(layer);
    EXPECT_TRUE(place.ok()) << place.status();
    auto gradient = std::make_shared<Contribution>();
    gradient->id = {v1::FRAME_KIND_GRADIENT, 0, layer};
    gradient->result = sink_;
    gradient->region = place->region;
    gradient->slot = place->slot;
    return gradient;
  }
  // The header of a RESULT that lies where the gradient lay.
  static v1::FrameHeader ResultIn(const Contribution& gradient) {
    v1::FrameHeader header;
    PayloadPath::Describe(gradient, {}, header);
    return header;
  }
  static void ExpectUnavailable(const absl::Status& status, const std::string& why) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }

  // The status of taking an answer, which the sink of these tests does at once.
  static absl::Status Take(const Contribution& item, const v1::FrameHeader& result) {
    absl::Status taken = absl::UnknownError("not called");
    PayloadPath::TakeFromSlot(item, result, {}, [&](const absl::Status& status) { taken = status; });
    return taken;
  }

  const std::shared_ptr<FakePlane> plane_ = std::make_shared<FakePlane>();
  const std::shared_ptr<SlotSink> sink_ = std::make_shared<SlotSink>();
  absl::Status refuses_;
  std::optional<std::string> grants_device_;
  int requests_ = 0;
  PayloadPath path_{{.address = "unix:/s", .connect_timeout = absl::Hours(1)}, [this] { Write(); }};
};

TEST_F(PayloadPathTest, DescribesInlineBytesOrAReference) {
  const std::vector<uint8_t> bytes = {1, 2, 3, 4, 5};
  Contribution inlined;
  inlined.payload = bytes;
  v1::FrameHeader header;
  const absl::Span<const uint8_t> chunk = PayloadPath::Describe(inlined, {.offset = 2, .size = 3}, header);
  EXPECT_EQ(chunk.data(), bytes.data() + 2);
  EXPECT_EQ(chunk.size(), 3u);
  EXPECT_EQ(header.chunk_offset(), 2u);
  EXPECT_EQ(header.payload_bytes(), 5u);
  EXPECT_FALSE(header.has_ring_offset());

  Gradient(0);
  const auto second = Gradient(1);
  v1::FrameHeader reference;
  EXPECT_TRUE(PayloadPath::Describe(*second, {}, reference).empty());
  EXPECT_EQ(reference.ring_offset(), kSlot);
  EXPECT_EQ(reference.payload_bytes(), kBytes);
  EXPECT_EQ(requests_, 1) << "one region a stream";
}

TEST_F(PayloadPathTest, WithoutAFreeSlotAGradientGoesInline) {
  const auto gradient = Gradient(0);
  ExpectUnavailable(Take(0).status(), "layer 0's last gradient is not answered yet");
  Gradient(1);
  ExpectUnavailable(Take(2).status(), "no room for layer 2's 48");
  path_.GiveBack(*gradient);
  EXPECT_EQ(Gradient(0)->slot.offset, 0u) << "a layer's slot stays where it is";
}

TEST_F(PayloadPathTest, RefusesAnAnswerToAnotherUseOfTheSlot) {
  const auto first = Gradient(0);
  EXPECT_TRUE(Take(*first, ResultIn(*first)).ok());
  EXPECT_EQ(sink_->taken, first->region->at(first->slot));
  EXPECT_EQ(sink_->others, 0u);
  path_.GiveBack(*first);
  const auto second = Gradient(0);
  EXPECT_EQ(Take(*first, ResultIn(*first)).code(), absl::StatusCode::kInternal);
  path_.GiveBack(*first);  // stale
  EXPECT_TRUE(PayloadPath::CheckSlot(*second).ok());
  v1::FrameHeader elsewhere = ResultIn(*second);
  elsewhere.set_ring_offset(kSlot);
  EXPECT_FALSE(Take(*second, elsewhere).ok());
}

TEST_F(PayloadPathTest, TheEndOfTheStreamEndsEveryUse) {
  auto gradient = Gradient(0);
  Gradient(1);
  path_.OnStreamClosing();
  EXPECT_TRUE(PayloadPath::CheckSlot(*gradient).ok()) << "its answer can still be read";
  path_.OnStreamEnd();
  EXPECT_EQ(gradient->region->in_use(), 0u);
  ExpectUnavailable(PayloadPath::CheckSlot(*gradient), "the ring is gone");
  EXPECT_FALSE(Take(*gradient, ResultIn(*gradient)).ok());
  EXPECT_EQ(plane_->rings, 1) << "a contribution holds it";
  gradient.reset();
  EXPECT_EQ(plane_->rings, 0);
  OpenStream();
  EXPECT_EQ(Gradient(1)->slot.offset, 0u) << "of a new region";
  EXPECT_EQ(requests_, 2);
}

TEST_F(PayloadPathTest, WithoutARegionGradientsGoInline) {
  plane_->maps = false;
  ExpectUnavailable(Take(0).status(), "no other process");
  ExpectUnavailable(Take(0).status(), "no other process");
  EXPECT_EQ(requests_, 1) << "it is asked for once a stream";
  ExpectUnavailable(path_.SlotStatus(plane_->device()), "no other process");
  plane_->maps = true;
  path_.OnStreamEnd();
  OpenStream();
  grants_device_ = "another";
  ExpectUnavailable(Take(0).status(), "another device");
  path_.OnStreamEnd();
  OpenStream();
  refuses_ = absl::ResourceExhaustedError("sessions have the memory");
  ExpectUnavailable(Take(0).status(), "sessions have the memory");
  path_.OnStreamEnd();
  path_.OnStreamOpen({});
  ExpectUnavailable(Take(0).status(), "offers no ring");
  EXPECT_EQ(plane_->rings, 0);
}

TEST_F(PayloadPathTest, AnExpiredGradientsSlotIsTheShardsUntilItsAnswer) {
  const auto gradient = Gradient(0);
  path_.Expire(*gradient);
  ExpectUnavailable(Take(0).status(), "not answered yet");
  // Another gradient of the step has come inline meanwhile: an inline answer is its.
  EXPECT_FALSE(path_.OnLateAnswer(gradient->id, std::make_shared<Contribution>(), /*in_slot=*/false));
  EXPECT_TRUE(path_.OnLateAnswer(gradient->id, nullptr, /*in_slot=*/true));
  EXPECT_FALSE(path_.OnLateAnswer(gradient->id, nullptr, /*in_slot=*/true));
  EXPECT_TRUE(Take(0).ok());
}

TEST_F(PayloadPathTest, WaitsForNoStreamOnceTold) {
  path_.OnStreamEnd();
  path_.StopWaiting();
  ExpectUnavailable(Take(0).status(), "no stream");
}

}  // namespace
}  // namespace precondor
