// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/result_state.h"

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/wire/tensor_codec.h"

namespace precondor {
namespace {

using State = PreconditionFuture::State;
using ::testing::HasSubstr;

constexpr int64_t kRows = 7, kCols = 13;

std::vector<float> Values() {
  std::vector<float> values(static_cast<size_t>(kRows * kCols));
  // Small integers and halves are exact in every type.
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int>(i) - 40) * 0.5f;
  return values;
}

// Bytes cut into `pieces` of random sizes, as gRPC delivers them.
wire::ReceivedBytes Cut(const std::vector<uint8_t>& bytes, size_t begin, size_t end, std::mt19937_64& rng) {
  auto owner = std::make_shared<std::string>(bytes.begin() + static_cast<int64_t>(begin),
                                             bytes.begin() + static_cast<int64_t>(end));
  std::vector<absl::string_view> pieces;
  for (size_t at = 0; at < owner->size();) {
    const size_t size = std::min<size_t>(1 + rng() % 9, owner->size() - at);
    pieces.push_back(absl::string_view(*owner).substr(at, size));
    at += size;
  }
  return wire::ReceivedBytes(std::move(pieces), owner);
}

struct Case {
  DType dtype;
  float scale;
  int64_t stride;
};

class ResultStateTest : public ::testing::TestWithParam<Case> {
 protected:
  ResultStateTest() : memory_(static_cast<size_t>(kRows * GetParam().stride), -5.0f) {}
  MatrixView out() { return MatrixView(memory_.data(), kRows, kCols, GetParam().stride); }
  wire::TensorFormat format() const { return {GetParam().dtype, {kRows, kCols}, GetParam().scale}; }
  std::vector<uint8_t> Encoded() const {
    const std::vector<float> values = Values();
    std::vector<uint8_t> bytes(values.size() * ByteSize(GetParam().dtype));
    EXPECT_TRUE(wire::EncodeMatrix(GetParam().dtype, GetParam().scale, ConstMatrixView(values.data(), kRows, kCols),
                                   absl::MakeSpan(bytes))
                    .ok());
    return bytes;
  }
  void ExpectWritten() {
    const std::vector<float> want = Values();
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kCols; ++j) ASSERT_EQ(out().at(i, j), want[static_cast<size_t>(i * kCols + j)]);
      for (int64_t j = kCols; j < GetParam().stride; ++j) ASSERT_EQ(out().at(i, j), -5.0f) << "guard";
    }
  }
  void ExpectUntouched() { ASSERT_EQ(memory_, std::vector<float>(memory_.size(), -5.0f)); }

  std::vector<float> memory_;
};

TEST_P(ResultStateTest, AssemblesAnyCut) {
  const std::vector<uint8_t> bytes = Encoded();
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 rng(seed);
    State state("step 1", out(), false, false);
    ASSERT_TRUE(state.Begin({format()}, bytes.size()).ok());
    for (size_t at = 0; at < bytes.size();) {
      EXPECT_FALSE(state.HasAllBytes());
      const size_t size = std::min<size_t>(1 + rng() % 100, bytes.size() - at);
      ASSERT_TRUE(state.Append(at, Cut(bytes, at, at + size, rng)).ok());
      at += size;
    }
    EXPECT_TRUE(state.HasAllBytes());
    EXPECT_FALSE(state.ready());
    EXPECT_TRUE(state.Complete({Decision::kPreconditioned, 3, 0, ""}));
    EXPECT_TRUE(state.ready());
    EXPECT_EQ(state.Wait()->factor_version, 3u);
    ExpectWritten();
    std::fill(memory_.begin(), memory_.end(), -5.0f);
  }
}

TEST_P(ResultStateTest, StartsOverAfterALostStream) {
  const std::vector<uint8_t> bytes = Encoded();
  std::mt19937_64 rng(1);
  State state("step 1", out(), false, false);
  ASSERT_TRUE(state.Begin({format()}, bytes.size()).ok());
  ASSERT_TRUE(state.Append(0, Cut(bytes, 0, 33, rng)).ok());
  state.Restart();
  EXPECT_TRUE(state.Append(33, Cut(bytes, 33, bytes.size(), rng)).ok()) << "the rest of the answer before";
  EXPECT_FALSE(state.HasAllBytes());
  ASSERT_TRUE(state.Begin({format()}, bytes.size()).ok());
  ASSERT_TRUE(state.Append(0, Cut(bytes, 0, bytes.size(), rng)).ok());
  ASSERT_TRUE(state.Complete({}));
  ExpectWritten();
}

TEST_P(ResultStateTest, AnAliasedGradientSurvivesUntilAllIsThereAndNobodyReadsIt) {
  const std::vector<uint8_t> bytes = Encoded();
  std::mt19937_64 rng(1);
  State state("step 1", out(), /*payload_borrowed=*/true, /*out_aliases_gradient=*/true);
  ASSERT_TRUE(state.Begin({format()}, bytes.size()).ok());
  ASSERT_TRUE(state.Append(0, Cut(bytes, 0, 50, rng)).ok());
  ExpectUntouched();
  state.Restart();
  ASSERT_TRUE(state.Begin({format()}, bytes.size()).ok());
  ASSERT_TRUE(state.Append(0, Cut(bytes, 0, bytes.size(), rng)).ok());
  ASSERT_TRUE(state.Complete({}));
  ExpectUntouched();
  EXPECT_FALSE(state.ready());
  state.OnPayloadReleased();
  EXPECT_TRUE(state.ready());
  ExpectWritten();
}

INSTANTIATE_TEST_SUITE_P(Formats, ResultStateTest,
                         ::testing::Values(Case{DType::kF32, 1, kCols}, Case{DType::kF32, 1, kCols + 3},
                                           Case{DType::kF32, 2, kCols}, Case{DType::kF16, 1, kCols},
                                           Case{DType::kF16, 0.5f, kCols + 3}, Case{DType::kBF16, 1, kCols}));

TEST(ResultStateErrorTest, NamesWhatDoesNotFit) {
  std::vector<float> memory(6);
  std::mt19937_64 rng(1);
  const std::vector<uint8_t> bytes(100);
  State state("step 1 layer 2", MatrixView(memory.data(), 2, 3), false, false);
  const auto message = [](const absl::Status& status) { return std::string(status.message()); };
  EXPECT_THAT(message(state.Begin({{DType::kF32, {3, 2}, 1}}, 24)),
              HasSubstr("step 1 layer 2: result: expected a tensor [2, 3], got [3, 2]"));
  EXPECT_THAT(message(state.Begin({{DType::kF32, {2, 3}, 1}}, 20)), HasSubstr("expected 24 bytes, got 20"));
  EXPECT_FALSE(state.Append(0, Cut(bytes, 0, 4, rng)).ok()) << "before Begin";
  EXPECT_TRUE(state.Append(4, Cut(bytes, 4, 8, rng)).ok()) << "the rest of another answer";
  ASSERT_TRUE(state.Begin({{DType::kF32, {2, 3}, 1}}, 24).ok());
  EXPECT_THAT(message(state.Append(4, Cut(bytes, 0, 4, rng))), HasSubstr("expected bytes from 0"));
  EXPECT_FALSE(state.Append(0, Cut(bytes, 0, 25, rng)).ok());
  EXPECT_FALSE(state.ready());
}

TEST(ResultStateErrorTest, TheFirstOutcomeCountsAndNothingIsWrittenAfterIt) {
  std::vector<float> memory(4, 9.0f);
  std::mt19937_64 rng(1);
  const std::vector<uint8_t> bytes(16);
  State state("step 1", MatrixView(memory.data(), 2, 2), false, false);
  ASSERT_TRUE(state.Begin({{DType::kF32, {2, 2}, 1}}, 16).ok());
  EXPECT_TRUE(state.Fail(absl::DeadlineExceededError("late")));
  EXPECT_TRUE(state.Append(0, Cut(bytes, 0, 16, rng)).ok());
  EXPECT_FALSE(state.Complete({}));
  EXPECT_FALSE(state.Fail(absl::InternalError("other")));
  EXPECT_EQ(state.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(state.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(memory, std::vector<float>(4, 9.0f));
}

TEST(ResultStateErrorTest, AFailureIsReadyOnlyWhenTheGradientIsFree) {
  State state("step 1", MatrixView(), /*payload_borrowed=*/true, false);
  state.Fail(absl::CancelledError("gone"));
  EXPECT_FALSE(state.ready());
  std::thread waiter([&state] { EXPECT_EQ(state.Wait().status().code(), absl::StatusCode::kCancelled); });
  state.OnPayloadReleased();
  waiter.join();
  EXPECT_TRUE(state.ready());
}

// Another rank may wait for a held gradient of any layer, so each question about any answer sends what is held.
TEST(ResultStateHeldTest, AskingSendsWhatIsHeldBackUntilTheWorkerEnds) {
  int sent = 0;
  const auto held = std::make_shared<HeldSender>([&sent] { ++sent; });
  State open("job", MatrixView(), false, false, held), answered("job", MatrixView(), false, false, held);
  EXPECT_FALSE(open.Ask());
  EXPECT_EQ(sent, 0) << "nothing is held";
  held->NoteHeld();
  EXPECT_FALSE(open.ready());
  EXPECT_EQ(sent, 0);
  EXPECT_FALSE(open.Ask());
  EXPECT_FALSE(open.Ask());
  EXPECT_EQ(sent, 1);
  held->NoteHeld();
  EXPECT_FALSE(open.WaitFor(absl::ZeroDuration()));
  EXPECT_EQ(sent, 2);
  held->NoteHeld();
  answered.Complete({});
  EXPECT_TRUE(answered.Ask());
  EXPECT_EQ(sent, 2) << "this answer is there";
  held->Stop();
  EXPECT_FALSE(open.Ask());
  EXPECT_EQ(sent, 2);
}

TEST(PreconditionFutureTest, WithoutAGradientIsAnError) {
  EXPECT_FALSE(PreconditionFuture().ready());
  EXPECT_EQ(PreconditionFuture().Wait().status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace precondor
