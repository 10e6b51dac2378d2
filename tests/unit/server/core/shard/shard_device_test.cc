// SPDX-License-Identifier: Apache-2.0
// Gradients that lie in memory of the backend's device: answered there, with the bits that they would have had as
// bytes, and by the same rules.
#include <limits>

#include "kernels/base/payload_digest.h"
#include "kernels/methods/registry.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class ShardDeviceTest : public ShardFixture {
 protected:
  ShardDeviceTest() {
    spec.exchange = ExchangeMode::kDelegate;
    spec.gradient_dtype = DType::kF32;
    options.ring_device = "a device of tests";
  }

  // Sends a gradient of layer 0, whose delegate is rank 0. `memory` is the worker's until the reply's end.
  std::shared_ptr<Reply> SendOnDevice(ContributionHeader header, const std::vector<float>& memory) {
    auto payload = std::make_shared<DevicePayload>();
    const std::vector<int64_t> dims = header.tensors.empty() ? std::vector<int64_t>{2, 3} : header.tensors[0].dims;
    payload->values = ConstMatrixView(memory.data(), dims[0], dims[1]);
    payload->facts.digest =
        PayloadDigest(reinterpret_cast<const uint8_t*>(memory.data()), static_cast<int64_t>(memory.size()));
    payload->facts.finite = std::all_of(memory.begin(), memory.end(), [](float value) { return std::isfinite(value); });
    header.on_device = std::move(payload);
    return Send(header, {});
  }
  ContributionHeader GradientHeader(uint64_t step) const { return Header(ContributionKind::kGradient, step, 0); }
  // Returns the values of an answer on the device.
  static std::vector<float> ValuesOf(const Reply& reply) {
    EXPECT_TRUE(reply.answer().on_device != nullptr);
    EXPECT_TRUE(reply.answer().bytes == nullptr);
    const absl::StatusOr<GradientResult> host = OnHost(reply.answer());
    EXPECT_TRUE(host.ok()) << host.status();
    EXPECT_EQ(host->payload_bytes(), reply.answer().payload_bytes());
    std::vector<float> values(host->bytes->size() / sizeof(float));
    std::memcpy(values.data(), host->bytes->data(), host->bytes->size());
    return values;
  }

  const std::vector<float> gradient_ = {1, -2, 3.5f, 0.25f, -7, 1e-3f};
};

TEST_F(ShardDeviceTest, AnswersOnTheDeviceAndLeavesTheGradient) {
  Start();
  AllStatistics(0);
  std::vector<float> memory = gradient_;
  const auto reply = SendOnDevice(GradientHeader(0), memory);
  EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
  EXPECT_EQ(reply->version(), 1u);
  EXPECT_EQ(ValuesOf(*reply), (std::vector<float>{2, -4, 7, 0.5f, -14, 2e-3f}));
  EXPECT_EQ(memory, gradient_);
  EXPECT_EQ(reply->answer().tensors[0].dims, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(shard->in_flight(), 0);
}

TEST_F(ShardDeviceTest, GivesTheBitsThatBytesGet) {
  options.make_method = MakeMethod;
  for (const std::string method : {"mkor", "eva", "kron", "soap", "muon", "identity"}) {
    spec.method = {.name = method, .options = {}};
    std::vector<std::vector<float>> answers;
    for (const bool on_device : {true, false}) {
      Start();
      for (uint64_t step = 0; step < 3; ++step) {
        AllStatistics(step);
        std::vector<float> memory = gradient_;
        memory[0] += static_cast<float>(step);
        const auto reply = on_device ? SendOnDevice(GradientHeader(step), memory)
                                     : Send(GradientHeader(step), EncodeValues(DType::kF32, memory));
        answers.push_back(on_device ? ValuesOf(*reply) : reply->values());
      }
    }
    for (size_t step = 0; step < 3; ++step) EXPECT_EQ(answers[step], answers[3 + step]) << method;
  }
}

TEST_F(ShardDeviceTest, WithoutFactorsTheAnswerIsTheGradient) {
  Start();
  Abstain(ContributionKind::kStatistics, 0, 0);
  Abstain(ContributionKind::kStatistics, 0, 1);
  const auto reply = SendOnDevice(GradientHeader(0), gradient_);
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_THAT(reply->answer().reason, HasSubstr("no factors yet"));
  EXPECT_EQ(ValuesOf(*reply), gradient_);
}

TEST_F(ShardDeviceTest, AnAnswerThatIsNotFiniteIsTheGradient) {
  Start();
  AllStatistics(0);
  log->set_poison_results(true);
  const auto reply = SendOnDevice(GradientHeader(0), gradient_);
  EXPECT_EQ(reply->decision(), Decision::kIdentity);
  EXPECT_THAT(reply->answer().reason, HasSubstr("not finite"));
  EXPECT_EQ(ValuesOf(*reply), gradient_);
}

TEST_F(ShardDeviceTest, ARepetitionGetsTheSameAnswerWhicheverWayItComes) {
  Start();
  AllStatistics(0);
  std::vector<float> memory = gradient_;
  const auto first = SendOnDevice(GradientHeader(0), memory);
  const std::vector<float> answer = ValuesOf(*first);
  // The worker has its memory back; what was answered stays.
  memory.assign(memory.size(), 99);
  const auto as_bytes = Send(GradientHeader(0), EncodeValues(DType::kF32, gradient_));
  EXPECT_TRUE(as_bytes->duplicate());
  EXPECT_EQ(ValuesOf(*as_bytes), answer);
  const auto on_device = SendOnDevice(GradientHeader(0), gradient_);
  EXPECT_TRUE(on_device->duplicate());
  EXPECT_EQ(ValuesOf(*on_device), answer);
}

TEST_F(ShardDeviceTest, OtherBytesUnderAUsedKeyAreRefusedWhicheverWayTheyCome) {
  Start();
  AllStatistics(0);
  AllStatistics(1);
  std::vector<float> other = gradient_;
  other[5] = -other[5];
  SendOnDevice(GradientHeader(0), gradient_);
  EXPECT_EQ(SendOnDevice(GradientHeader(0), other)->reason(), ErrorReason::kConflict);
  EXPECT_EQ(Send(GradientHeader(0), EncodeValues(DType::kF32, other))->reason(), ErrorReason::kConflict);
  Send(GradientHeader(1), EncodeValues(DType::kF32, gradient_));
  EXPECT_EQ(SendOnDevice(GradientHeader(1), other)->reason(), ErrorReason::kConflict);
  EXPECT_TRUE(SendOnDevice(GradientHeader(1), gradient_)->duplicate());
}

TEST_F(ShardDeviceTest, AGradientThatIsNotFiniteIsRefusedAndTheStepSkipped) {
  Start();
  AllStatistics(0);
  std::vector<float> bad = gradient_;
  bad[2] = std::numeric_limits<float>::infinity();
  const auto refused = SendOnDevice(GradientHeader(0), bad);
  EXPECT_EQ(refused->reason(), ErrorReason::kNonFinite);
  const auto abstained = Abstain(ContributionKind::kGradient, 0, 0);
  EXPECT_EQ(abstained->decision(), Decision::kSkip);
}

// No process may write there meanwhile. If one does all the same, its bytes must not become part of factors.
TEST_F(ShardDeviceTest, AGradientThatChangesBehindTheShardsBackSpoilsNothing) {
  options.make_method = MakeMethod;
  for (const std::string method : {"mkor", "kron"}) {
    spec.method = {.name = method, .options = {}};
    Start();
    AllStatistics(0);
    ASSERT_TRUE(SendOnDevice(GradientHeader(0), gradient_)->answered());
    std::vector<float> memory = gradient_;
    ContributionHeader header = GradientHeader(1);
    if (method == "mkor") {
      const auto reply = SendOnDevice(header, memory);  // waits for the step's statistics
      EXPECT_FALSE(reply->answered());
      memory[1] = std::numeric_limits<float>::quiet_NaN();
      AllStatistics(1);
      EXPECT_EQ(reply->decision(), Decision::kSkip);
    } else {
      auto payload = std::make_shared<DevicePayload>();
      memory[1] = std::numeric_limits<float>::quiet_NaN();
      payload->values = ConstMatrixView(memory.data(), 2, 3);
      payload->facts.finite = true;  // as it was when it came
      header.on_device = payload;
      const auto reply = Send(header, {});
      EXPECT_EQ(reply->decision(), Decision::kSkip);
      AllStatistics(1);
    }
    AllStatistics(2);
    const auto next = SendOnDevice(GradientHeader(2), gradient_);
    EXPECT_NE(next->decision(), Decision::kSkip);
    for (const float value : ValuesOf(*next)) EXPECT_TRUE(std::isfinite(value)) << method;
  }
}

TEST_F(ShardDeviceTest, TakesOnlyWhatIsAnsweredInItsPlace) {
  const auto refused = [&](ContributionHeader header) {
    auto payload = std::make_shared<DevicePayload>();
    header.on_device = payload;
    return GetErrorReason(Admission(header, header.tensors.empty() ? 0 : 24));
  };
  Start();
  EXPECT_EQ(refused(GradientHeader(0)), ErrorReason::kUnspecified);
  ContributionHeader scaled = GradientHeader(0);
  scaled.tensors[0].scale = 2;
  EXPECT_EQ(refused(scaled), ErrorReason::kMalformed);
  ContributionHeader abstention = GradientHeader(0);
  abstention.abstain = true;
  abstention.tensors.clear();
  EXPECT_EQ(refused(abstention), ErrorReason::kMalformed);
  EXPECT_EQ(refused(Header(ContributionKind::kStatistics, 0, 0)), ErrorReason::kSizeMismatch);
  spec.exchange = ExchangeMode::kDirect;  // of two ranks
  Start();
  EXPECT_EQ(refused(GradientHeader(0)), ErrorReason::kMalformed);
}

}  // namespace
}  // namespace precondor
