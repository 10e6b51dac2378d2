// SPDX-License-Identifier: Apache-2.0
// Every way in which a contribution is refused, and that nothing changes when it is.
#include "server/core/layer/admission.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/base/payload_digest.h"
#include "server/core/layer/layer_driver.h"
#include "server/core/shard/shard_session.h"
#include "tests/unit/server/core/shard/shard_fixture.h"

namespace precondor {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A layer takes admitted contributions alone, each at most once, and no other code than the session admits any.
template <typename Contribution>
concept SubmittedToLayers = requires(LayerDriver& layer, Contribution contribution, const AckFn& ack, ResultFn result) {
  layer.Submit(std::move(contribution), Payload(), ack, result);
};
static_assert(SubmittedToLayers<AdmittedContribution> && !SubmittedToLayers<ContributionHeader>);
static_assert(
    !std::is_constructible_v<AdmittedContribution, ContributionHeader, uint64_t, std::weak_ptr<SessionContext>>);
static_assert(!std::is_default_constructible_v<AdmittedContribution> &&
              !std::is_copy_constructible_v<AdmittedContribution>);

using Kinds = std::vector<ContributionKind>;

// A contribution of layer 0 and rank 0, for step 0 unless `spoil` says otherwise.
struct Refused {
  const char* what;
  Kinds kinds;
  std::function<void(ContributionHeader&)> spoil;
  StatusCode code;
  ErrorReason reason;
  std::string message;
};

constexpr ContributionKind kStatistics = ContributionKind::kStatistics;
constexpr ContributionKind kGradient = ContributionKind::kGradient;
const Kinds kOfStatistics = {kStatistics}, kOfGradients = {kGradient}, kOfBoth = {kStatistics, kGradient},
            kOfPulls = {ContributionKind::kPull};

void Unspoiled(ContributionHeader&) {}

class AdmissionTest : public ShardFixture {
 protected:
  void ExpectRefused(const Refused& refused) {
    for (const ContributionKind kind : refused.kinds) {
      ContributionHeader header = Header(kind, 0, 0);
      Payload payload = Filled(header, 1);
      refused.spoil(header);
      const auto reply = Send(header, std::move(payload));
      SCOPED_TRACE(refused.what + std::string(kind == kStatistics ? " of statistics" : ""));
      ASSERT_TRUE(reply->ack.has_value());
      EXPECT_THAT(reply->ack->status(), StatusIs(refused.code, refused.reason, refused.message));
      EXPECT_FALSE(reply->answered());
    }
  }
  // The message that names layer 0 of rank 0, or of another key.
  static std::string Of(const std::string& what, const std::string& key = "step 0 layer 0 \"first\" rank 0") {
    return "session \"job\" " + key + ": " + what;
  }
  // The step is what it would be if the refused had never come.
  void ExpectUntouched() {
    EXPECT_EQ(StatsOf(0).accepted, 0u);
    EXPECT_EQ(shard->in_flight(), 0);
    for (uint32_t rank : {0, 1}) EXPECT_TRUE(Statistics(0, rank, 1)->accepted());
    const auto reply = Gradients(0, {1, 1});
    EXPECT_EQ(reply->decision(), Decision::kPreconditioned);
    EXPECT_EQ(reply->version(), 1u);
  }
};

TEST_F(AdmissionTest, RefusesWhatDoesNotFitAndChangesNothing) {
  Start();
  const std::vector<Refused> table = {
      {"session", kOfBoth, [](auto& h) { h.key.session_id = 99; }, StatusCode::kNotFound, ErrorReason::kUnknownSession,
       "session_id 99: no such session on this shard"},
      {"old epoch", kOfBoth, [](auto& h) { h.key.epoch = 0; }, StatusCode::kFailedPrecondition,
       ErrorReason::kStaleEpoch, Of("expected epoch 1, got 0")},
      {"new epoch", kOfBoth, [](auto& h) { h.key.epoch = 2; }, StatusCode::kUnavailable, ErrorReason::kFutureEpoch,
       Of("epoch is 1 here so far, got 2")},
      {"rank", kOfBoth, [](auto& h) { h.key.rank = 2; }, StatusCode::kNotFound, ErrorReason::kUnknownRank,
       Of("expected a rank below 2", "step 0 layer 0 \"first\" rank 2")},
      {"old incarnation", kOfBoth, [](auto& h) { h.key.incarnation = 0; }, StatusCode::kFailedPrecondition,
       ErrorReason::kStaleIncarnation, Of("held by incarnation 1, got 0")},
      {"new incarnation", kOfBoth, [](auto& h) { h.key.incarnation = 2; }, StatusCode::kNotFound,
       ErrorReason::kUnknownRank, Of("incarnation 2 has not joined, the rank's is 1")},
      {"layer", kOfBoth, [](auto& h) { h.key.layer = 2; }, StatusCode::kNotFound, ErrorReason::kUnknownLayer,
       Of("expected a layer below 2", "step 0 layer 2 \"\" rank 0")},
      {"a step that counts over", kOfBoth, [](auto& h) { h.key.step = ~uint64_t{0}; }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed,
       Of("step: expected at most 281474976710656", "step 18446744073709551615 layer 0 \"first\" rank 0")},
      {"statistics in first order", kOfStatistics, [](auto& h) { h.mode = Mode::kFirstOrder; },
       StatusCode::kFailedPrecondition, ErrorReason::kNotStatisticStep, Of("steps in first order take no statistics")},
      {"a pull", kOfPulls, Unspoiled, StatusCode::kInvalidArgument, ErrorReason::kMalformed,
       Of("expected GRADIENT with exchange DIRECT, got PULL")},
      {"no samples", kOfBoth, [](auto& h) { h.samples = 0; }, StatusCode::kInvalidArgument, ErrorReason::kMalformed,
       Of("samples: expected 1 ... 1099511627776, got 0")},
      {"samples", kOfBoth, [](auto& h) { h.samples = ~uint64_t{0}; }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, Of("samples: expected 1 ... 1099511627776, got 18446744073709551615")},
      {"tensors", kOfGradients, [](auto& h) { h.tensors.emplace_back(); }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, Of("expected 1 tensors, got 2")},
      {"no tensors", kOfStatistics, [](auto& h) { h.tensors.clear(); }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, Of("expected 2 tensors, got 0")},
      {"dtype", kOfGradients, [](auto& h) { h.tensors[0].dtype = DType::kBF16; }, StatusCode::kInvalidArgument,
       ErrorReason::kDTypeMismatch, Of("gradient: expected f32, got bf16")},
      {"shape", kOfGradients, [](auto& h) { std::swap(h.tensors[0].dims[0], h.tensors[0].dims[1]); },
       StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch, Of("gradient: expected [2, 3], got [3, 2]")},
      {"shape", kOfStatistics,
       [](auto& h) {
         for (int64_t& d : h.tensors[1].dims) d = -d;
       },
       StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch, Of("g: expected [1, 2], got [-1, -2]")},
      {"number of dimensions", kOfGradients, [](auto& h) { h.tensors[0].dims.assign(100000, 1); },
       StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
       Of("gradient: expected [2, 3], got [1, 1, 1, 1, 1, 1, 1, 1, ...]")},
      {"scale 0", kOfGradients, [](auto& h) { h.tensors[0].scale = 0; }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, Of("gradient: expected a finite positive scale, got 0")},
      {"scale nan", kOfStatistics, [](auto& h) { h.tensors[0].scale = std::nanf(""); }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, Of("a: expected a finite positive scale, got nan")},
      {"an abstention with tensors", kOfGradients, [](auto& h) { h.abstain = true; }, StatusCode::kInvalidArgument,
       ErrorReason::kMalformed, Of("an abstention has no tensors, got 1")},
      {"an abstention with a payload", kOfGradients,
       [](auto& h) {
         h.abstain = true;
         h.tensors.clear();
       },
       StatusCode::kInvalidArgument, ErrorReason::kSizeMismatch, Of("an abstention has no payload, got 24 bytes")},
  };
  for (const Refused& refused : table) ExpectRefused(refused);
  uint64_t count = 0;
  for (const Refused& refused : table) count += refused.kinds.size();
  // Those of sessions and layers that the shard does not have are counted by the observer alone.
  EXPECT_EQ(StatsOf(0).rejected, count - 4);
  ExpectUntouched();
}

TEST_F(AdmissionTest, RefusesWhatTheSessionDoesNotTakeAtTheStepOrFromTheRank) {
  spec.exchange = ExchangeMode::kDelegate;  // of layer 0 rank 0 is the delegate
  spec.inv_freq = 10;
  spec.warmup_steps = 2;
  Start();
  const auto at_step_2 = [](ContributionHeader& h) { h.key.step = 2; };
  ExpectRefused({"not a statistic step", kOfStatistics, at_step_2, StatusCode::kFailedPrecondition,
                 ErrorReason::kNotStatisticStep,
                 Of("statistic steps are those below 2 and every 10th", "step 2 layer 0 \"first\" rank 0")});
  ExpectRefused({"not the delegate", kOfGradients, [](auto& h) { h.key.rank = 1; }, StatusCode::kFailedPrecondition,
                 ErrorReason::kNotDelegate,
                 Of("rank 0 sends this layer's gradient", "step 0 layer 0 \"first\" rank 1")});
  EXPECT_TRUE(Statistics(1, 0, 1)->accepted());
}

TEST_F(AdmissionTest, RefusesStepsOutsideTheWindowAndOtherModes) {
  Start();
  EXPECT_TRUE(Statistics(0, 0, 1)->accepted());
  ExpectRefused({"another mode", kOfGradients, [](auto& h) { h.mode = Mode::kFirstOrder; },
                 StatusCode::kFailedPrecondition, ErrorReason::kModeConflict,
                 Of(absl::StrCat("expected mode ", ModeName(Mode::kSecondOrder), " as the step began, got ",
                                 ModeName(Mode::kFirstOrder)))});
  ExpectRefused({"too far ahead", kOfBoth, [](auto& h) { h.key.step = 9; }, StatusCode::kFailedPrecondition,
                 ErrorReason::kStepTooFarAhead,
                 Of("step 0 is not finished or lies too far back; the window is 2 steps, and a step without a gradient "
                    "needs an abstention",
                    "step 9 layer 0 \"first\" rank 0")});
  for (uint64_t step = 0; step < 4; ++step) {
    for (uint32_t rank : {0, 1}) EXPECT_TRUE(Statistics(step, rank, 1)->accepted());
    for (uint32_t rank : {0, 1}) EXPECT_TRUE(Gradient(step, rank, 1)->accepted());
  }
  ExpectRefused({"retired", kOfGradients, Unspoiled, StatusCode::kAborted, ErrorReason::kStaleStep,
                 Of("steps below 2 are retired")});
  EXPECT_EQ(StatsOf(0).factor_version, 4u);
}

TEST_F(AdmissionTest, RefusesPayloadsOfAnotherSizeBeforeTheyCome) {
  Start();
  const ContributionHeader header = Header(kGradient, 0, 0);
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{23}, uint64_t{25}, uint64_t{5} << 30}) {
    const absl::Status status = Admission(header, bytes);
    EXPECT_EQ(GetErrorReason(status), ErrorReason::kSizeMismatch) << bytes;
    EXPECT_EQ(status.message(), Of(absl::StrCat("expected a payload of 24 bytes, got ", bytes)));
  }
  EXPECT_TRUE(Admission(header, 24).ok());
  ContributionHeader abstention = header;
  abstention.abstain = true;
  abstention.tensors.clear();
  EXPECT_TRUE(Admission(abstention, 0).ok());
  ExpectUntouched();
}

TEST_F(AdmissionTest, RefusesLayersOfAnotherShard) {
  MakeShard();
  SessionInstall install = MakeInstall();
  install.layers = {1};
  ASSERT_TRUE(shard->Install(install).ok());
  ExpectRefused({"another shard's", kOfBoth, Unspoiled, StatusCode::kFailedPrecondition, ErrorReason::kNotOwner,
                 Of("another shard owns the layer")});
}

TEST_F(AdmissionTest, WaitsForAllRanksAndForTheNextEpoch) {
  MakeShard();
  SessionInstall install = MakeInstall();
  install.members.pop_back();
  ASSERT_TRUE(shard->Install(install).ok());
  ExpectRefused({"a rank is missing", kOfBoth, Unspoiled, StatusCode::kUnavailable, ErrorReason::kNotActive,
                 Of("1 of 2 ranks have joined")});
  ASSERT_TRUE(shard->Install(MakeInstall()).ok());
  EXPECT_TRUE(Gradient(0, 0, 1)->accepted());
  ASSERT_TRUE(shard->Fence({.session_id = kSession, .epoch = 2, .members = MakeInstall().members}).ok());
  ExpectRefused({"the epoch is over", kOfGradients, Unspoiled, StatusCode::kFailedPrecondition,
                 ErrorReason::kStaleEpoch, Of("expected epoch 2, got 1")});
  ExpectRefused({"the next one has not begun", kOfGradients, [](auto& h) { h.key.epoch = 2; }, StatusCode::kUnavailable,
                 ErrorReason::kNotActive, Of("the epoch is about to begin")});
}

// A payload may take its time. What has changed until it is there refuses it.
TEST_F(AdmissionTest, WhatHasChangedSinceTheAdmissionRefusesTheContribution) {
  struct Change {
    const char* what;
    std::function<void()> change;
    StatusCode code;
    ErrorReason reason;
  };
  const std::vector<Change> changes = {
      {"removed", [this] { ASSERT_TRUE(*shard->Remove(kSession)); }, StatusCode::kNotFound,
       ErrorReason::kUnknownSession},
      {"installed again",
       [this] {
         ASSERT_TRUE(*shard->Remove(kSession));
         ASSERT_TRUE(shard->Install(MakeInstall()).ok());
       },
       StatusCode::kUnavailable, ErrorReason::kNotActive},
      {"the next epoch", [this] { ASSERT_TRUE(shard->Install(MakeInstall(2)).ok()); }, StatusCode::kFailedPrecondition,
       ErrorReason::kStaleEpoch},
  };
  for (const Change& change : changes) {
    Start();
    const ContributionHeader header = Header(kStatistics, 0, 0);
    Payload payload = Filled(header, 1);
    absl::StatusOr<AdmittedContribution> admitted = shard->data_plane().AdmitContribution(header, payload.size());
    ASSERT_TRUE(admitted.ok()) << admitted.status();
    change.change();
    std::vector<absl::Status> acks;
    shard->data_plane().Submit(
        *std::move(admitted), std::move(payload),
        [&](const absl::StatusOr<bool>& ack) { acks.push_back(ack.status()); },
        /*result=*/nullptr);
    EXPECT_THAT(acks, ElementsAre(StatusIs(change.code, change.reason))) << change.what;
    EXPECT_EQ(shard->in_flight(), 0) << change.what;
  }
}

TEST_F(AdmissionTest, RefusesPartsThatAreNotOfTheGradient) {
  spec.exchange = ExchangeMode::kSharded;
  Start();
  const auto with = [this](ContributionKind kind, std::vector<GradientPart> parts) {
    ContributionHeader header = Header(kind, 0, 0);
    header.parts = std::move(parts);
    if (kind == kGradient) header.tensors[0].dims = {1, SentElements(header.parts)};
    return header;
  };
  const auto refused = [this](const ContributionHeader& header) {
    const auto reply = Send(header, Filled(header, 1));
    EXPECT_FALSE(reply->accepted());
    return std::string(reply->ack->status().message());
  };
  const GradientPart whole{.rows = 2, .cols = 3}, corner{.rows = 1, .cols = 1};
  EXPECT_EQ(refused(with(kGradient, {{.row = 1, .rows = 2, .cols = 3}})),
            Of("parts[0]: expected a part of [2, 3], got rows 1 + 2, columns 0 + 3"));
  EXPECT_EQ(refused(with(kGradient, {corner, {.rows = 0, .col = 1, .cols = 1}})),
            Of("parts[1]: expected a part of [2, 3], got rows 0 + 0, columns 1 + 1"));
  EXPECT_EQ(refused(with(kGradient, {whole, corner})), Of("parts: expected at most the gradient's 6 elements, got 7"));
  EXPECT_EQ(refused(with(kGradient, std::vector<GradientPart>(65, corner))), Of("expected at most 64 parts, got 65"));
  EXPECT_EQ(refused(with(kStatistics, {corner})), Of("expected at most 0 parts, got 1"));
  ContributionHeader other_shape = with(kGradient, {whole});
  other_shape.tensors[0].dims = {2, 3};
  EXPECT_EQ(refused(other_shape), Of("gradient: expected [1, 6], got [2, 3]"));
  // A ring takes no parts, and the check comes before anything is read from it.
  ContributionHeader on_device = with(kGradient, {});
  on_device.tensors.clear();
  on_device.on_device = std::make_shared<DevicePayload>();
  EXPECT_THAT(std::string(Admission(on_device, 0).message()), HasSubstr("in a ring: expected a gradient"));
  EXPECT_EQ(StatsOf(0).accepted, 0u);
}

TEST_F(AdmissionTest, CountsRejectionsByReason) {
  class Counting final : public Observer {
   public:
    void OnRejected(absl::string_view job, ContributionKind, ErrorReason reason) override {
      seen.emplace_back(job, reason);
    }
    std::vector<std::pair<std::string, ErrorReason>> seen;
  } counting;
  Start(counting);
  Gradient(0, 0, std::nanf(""));
  ContributionHeader unknown = Header(kGradient, 0, 0);
  unknown.key.session_id = 99;
  Send(unknown, {});
  EXPECT_THAT(counting.seen, ElementsAre(std::make_pair(std::string("job"), ErrorReason::kNonFinite),
                                         std::make_pair(std::string(""), ErrorReason::kUnknownSession)));
  EXPECT_EQ(StatsOf(0).rejected, 1u);
  shard.reset();
}

constexpr int64_t kElements = 2 * IncomingFacts::kBlock + 500;

std::vector<float> Values() {
  std::vector<float> values(kElements);
  for (int64_t i = 0; i < kElements; ++i) values[static_cast<size_t>(i)] = static_cast<float>(i % 7) - 3;
  return values;
}

ContributionHeader Gradient(DType dtype, float scale) {
  ContributionHeader header;
  header.kind = ContributionKind::kGradient;
  header.tensors = {{.dtype = dtype, .dims = {1, kElements}, .scale = scale}};
  return header;
}

IncomingFacts Inspect(const ContributionHeader& header, const Payload& payload, bool device_plane = false,
                      std::vector<size_t> arrived = {}) {
  IncomingFacts facts(header, payload.size(), /*with_norm=*/true, device_plane);
  arrived.push_back(payload.size());
  for (const size_t bytes : arrived) facts.Advance(absl::MakeConstSpan(payload).subspan(0, bytes));
  return facts;
}

TEST(IncomingFactsTest, FindsTheSameHoweverThePayloadArrives) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const ContributionHeader header = Gradient(dtype, 2);
    const Payload payload = EncodeValues(dtype, Values(), 2);
    const IncomingFacts whole = Inspect(header, payload);
    const IncomingFacts parts = Inspect(header, payload, false, {0, 1, 4095, 4097, 4097, payload.size() - 1});
    EXPECT_EQ(parts.found().digest, whole.found().digest);
    EXPECT_EQ(parts.found().squared_norm, whole.found().squared_norm);
    EXPECT_FALSE(parts.found().not_finite.has_value());
    double squared = 0;
    for (const float value : Values()) squared += static_cast<double>(value) * value;
    EXPECT_EQ(whole.found().squared_norm, squared) << "small integers are exact";
  }
}

TEST(IncomingFactsTest, ItsDigestDependsOnEachByte) {
  const ContributionHeader header = Gradient(DType::kF32, 1);
  const Payload payload = EncodeValues(DType::kF32, Values());
  const uint64_t digest = Inspect(header, payload).found().digest;
  for (const size_t at : {size_t{0}, size_t{4096}, payload.size() - 1}) {
    Payload other = payload;
    other[at] ^= 1;
    EXPECT_NE(Inspect(header, other).found().digest, digest) << at;
  }
  Payload swapped = payload;  // the first two blocks change places
  std::swap_ranges(swapped.begin(), swapped.begin() + 4096, swapped.begin() + 4096);
  EXPECT_NE(Inspect(header, swapped).found().digest, digest);
}

TEST(IncomingFactsTest, ADevicePlaneGivesTheDigestOfTheElements) {
  const Payload payload = EncodeValues(DType::kF32, Values());
  EXPECT_EQ(Inspect(Gradient(DType::kF32, 1), payload, /*device_plane=*/true, {5000}).found().digest,
            PayloadDigest(payload.data(), kElements));
}

TEST(IncomingFactsTest, NamesTheFirstBlockWithAValueThatIsNotFinite) {
  std::vector<float> values = Values();
  values[IncomingFacts::kBlock + 1] = std::numeric_limits<float>::quiet_NaN();
  values.back() = std::numeric_limits<float>::infinity();
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Payload payload = EncodeValues(dtype, values);
    EXPECT_EQ(Inspect(Gradient(dtype, 1), payload, false, {6000}).found().not_finite, IncomingFacts::kBlock);
  }
  // A finite element times the scale may be infinite.
  EXPECT_EQ(Inspect(Gradient(DType::kF32, 1e38f), EncodeValues(DType::kF32, Values())).found().not_finite,
            std::nullopt);
  EXPECT_EQ(Inspect(Gradient(DType::kF32, 3e38f), EncodeValues(DType::kF32, Values())).found().not_finite, 0);
}

}  // namespace

}  // namespace precondor
