// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/src/local_factors.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/clock.h"
#include "kernels/base/error_reason.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/methods/state_codec.h"
#include "tests/support/normal_floats.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using State = PreconditionFuture::State;

constexpr int64_t kRows = 4, kCols = 3;
constexpr absl::Duration kLong = absl::Seconds(60);

// A shard's factors of the one layer, and what it hands out.
class Shard {
 public:
  explicit Shard(const SessionSpec& spec)
      : methods_(*MethodSet::Make(spec)),
        backend_(*MakeCpuBackend({})),
        state_(*methods_.of(0).MakeState(spec.layers[0], *backend_)) {}

  std::string Saved() const { return *state_->Save(); }
  uint64_t version() const { return state_->version(); }
  // Applies a step's vectors, a and then g.
  std::vector<float> Update(uint64_t step) {
    std::vector<float> vectors = Normal(kCols + kRows, step);
    DeviceMatrix a = *backend_->Allocate(1, kCols), g = *backend_->Allocate(1, kRows);
    EXPECT_TRUE(backend_->Upload(ConstMatrixView(vectors.data(), 1, kCols), a.view()).ok());
    EXPECT_TRUE(backend_->Upload(ConstMatrixView(vectors.data() + kCols, 1, kRows), g.view()).ok());
    EXPECT_TRUE(state_->Update({.a = a.view(), .g = g.view()}).ok());
    return vectors;
  }
  std::vector<float> Precondition(const std::vector<float>& gradient) {
    DeviceMatrix d = *backend_->Allocate(kRows, kCols), u = *backend_->Allocate(kRows, kCols);
    EXPECT_TRUE(backend_->Upload(ConstMatrixView(gradient.data(), kRows, kCols), d.view()).ok());
    EXPECT_TRUE(state_->Precondition(d.view(), u.view()).ok());
    std::vector<float> out(gradient.size());
    EXPECT_TRUE(backend_->Download(u.view(), MatrixView(out.data(), kRows, kCols)).ok());
    return out;
  }

 private:
  const MethodSet methods_;
  const std::unique_ptr<Backend> backend_;
  const std::unique_ptr<LayerState> state_;
};

wire::ReceivedBytes Received(std::string bytes) {
  const auto owner = std::make_shared<const std::string>(std::move(bytes));
  return wire::ReceivedBytes({*owner}, owner);
}

void Deliver(AnswerSink& sink, uint64_t version, const std::vector<wire::TensorFormat>& tensors,
             const std::string& bytes) {
  ASSERT_TRUE(sink.Begin(tensors, bytes.size()).ok());
  ASSERT_TRUE(sink.Append(0, Received(bytes)).ok());
  ASSERT_TRUE(sink.HasAllBytes());
  EXPECT_TRUE(sink.Complete({Decision::kPreconditioned, version, 0, ""}));
}

void DeliverVectors(AnswerSink& sink, uint64_t version, const std::vector<float>& vectors) {
  const auto* bytes = reinterpret_cast<const char*>(vectors.data());
  Deliver(sink, version, {{DType::kF32, {1, kCols}, 1}, {DType::kF32, {1, kRows}, 1}},
          std::string(bytes, bytes + vectors.size() * sizeof(float)));
}

// Statistic steps are 0, 2, 4 ...; a test plays the shard.
class LocalFactorsTest : public ::testing::Test {
 protected:
  explicit LocalFactorsTest(int world_size = 2) {
    spec_.name = "job";
    spec_.world_size = world_size;
    spec_.exchange = ExchangeMode::kReplay;
    spec_.statistics = StatisticsKind::kMean;
    spec_.inv_freq = 2;
    spec_.warmup_steps = 0;
    spec_.layers = {{"layer", kRows, kCols, false}};
    shard_ = std::make_unique<Shard>(spec_);
    auto made = LocalFactors::Make(spec_, 2, "session job", [this](int64_t, const std::shared_ptr<AnswerSink>& sink) {
      MutexLock lock(mu_);
      fetches_.push_back(sink);
      changed_.notify_all();
    });
    EXPECT_TRUE(made.ok()) << made.status();
    factors_ = *std::move(made);
  }

  struct Asked {
    std::vector<float> gradient, out;
    std::shared_ptr<State> answer;
  };
  std::unique_ptr<Asked> Ask(uint64_t step) {
    auto asked = std::make_unique<Asked>();
    asked->gradient = Normal(kRows * kCols, 100 + step);
    asked->out.resize(asked->gradient.size());
    const MatrixView out(asked->out.data(), kRows, kCols);
    asked->answer = std::make_shared<State>("gradient", out, false, false);
    factors_->Precondition(step, 0, ConstMatrixView(asked->gradient.data(), kRows, kCols), out, asked->answer);
    return asked;
  }
  // Waits for the `index`-th FETCH.
  std::shared_ptr<AnswerSink> AwaitFetch(size_t index) {
    MutexLock lock(mu_);
    const bool came = changed_.wait_for(mu_, absl::ToChronoSeconds(kLong),
                                        [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return fetches_.size() > index; });
    EXPECT_TRUE(came);
    return came ? fetches_[index] : nullptr;
  }
  size_t fetches() const {
    MutexLock lock(mu_);
    return fetches_.size();
  }
  // Step 2, whose update is of a version that the shard has lost when it is asked for its factors.
  std::unique_ptr<Asked> AskOverALoss() {
    const std::string fresh = shard_->Saved();
    const std::vector<float> vectors = shard_->Update(0);
    const auto pull = factors_->ExpectUpdate(0, 2);
    auto asked = Ask(2);
    GiveFactors(*AwaitFetch(0));
    DeliverVectors(*pull, 3, vectors);
    Deliver(*AwaitFetch(1), 0, {}, fresh);
    return asked;
  }
  void GiveFactors(AnswerSink& sink) { Deliver(sink, shard_->version(), {}, shard_->Saved()); }
  void ExpectAnswer(const Asked& asked) {
    const auto outcome = asked.answer->Wait();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->decision, Decision::kPreconditioned);
    EXPECT_EQ(outcome->factor_version, shard_->version());
    EXPECT_EQ(asked.out, shard_->Precondition(asked.gradient));
  }
  void ExpectFailure(const Asked& asked, absl::StatusCode code, const std::string& text) {
    const auto outcome = asked.answer->Wait();
    EXPECT_EQ(outcome.status().code(), code) << outcome.status();
    EXPECT_THAT(std::string(outcome.status().message()), HasSubstr(text));
  }

  SessionSpec spec_;
  std::unique_ptr<Shard> shard_;
  mutable Mutex mu_;
  CondVar changed_;
  std::vector<std::shared_ptr<AnswerSink>> fetches_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<LocalFactors> factors_;
};

TEST_F(LocalFactorsTest, GoesOnFromTheFactorsThatItFetches) {
  shard_->Update(1000);
  const auto between = Ask(1);
  factors_->Need(0);
  EXPECT_EQ(fetches(), 1u);
  EXPECT_FALSE(between->answer->ready());
  GiveFactors(*AwaitFetch(0));
  ExpectAnswer(*between);
  const auto pull = factors_->ExpectUpdate(0, 2);
  const auto at = Ask(2);
  EXPECT_FALSE(at->answer->ready()) << "its update has not come";
  DeliverVectors(*pull, 2, shard_->Update(2));
  ExpectAnswer(*at);
  EXPECT_EQ(fetches(), 1u);
}

TEST_F(LocalFactorsTest, AGradientBeforeAnUpdateIsAnsweredWithoutIt) {
  shard_->Update(1000);
  const auto before = Ask(1);
  const auto pull = factors_->ExpectUpdate(0, 2);
  DeliverVectors(*pull, 2, Normal(kCols + kRows, 2));
  const auto after = Ask(2);
  GiveFactors(*AwaitFetch(0));
  ExpectAnswer(*before);
  shard_->Update(2);
  ExpectAnswer(*after);
}

TEST_F(LocalFactorsTest, AnUpdateThatItHasChangesNothing) {
  // A process that begins again: the predecessor's statistics are in the factors.
  const std::vector<float> vectors = shard_->Update(0);
  const auto pull = factors_->ExpectUpdate(0, 0);
  const auto asked = Ask(0);
  GiveFactors(*AwaitFetch(0));
  DeliverVectors(*pull, 1, vectors);
  ExpectAnswer(*asked);
}

TEST_F(LocalFactorsTest, WhoeverMissesAnUpdateFetches) {
  factors_->Need(0);
  GiveFactors(*AwaitFetch(0));
  shard_->Update(0);
  const auto pull = factors_->ExpectUpdate(0, 2);
  const auto asked = Ask(2);
  const std::vector<float> vectors = shard_->Update(2);
  DeliverVectors(*pull, 2, vectors);
  GiveFactors(*AwaitFetch(1));
  ExpectAnswer(*asked);
  // Factors that are beyond the step's are not the others'.
  const auto next = factors_->ExpectUpdate(0, 4);
  const auto late = Ask(4);
  for (const uint64_t step : {4, 6, 8}) shard_->Update(step);
  DeliverVectors(*next, 4, vectors);
  GiveFactors(*AwaitFetch(2));
  ExpectFailure(*late, absl::StatusCode::kFailedPrecondition, "of version 4, those fetched of version 5");
}

TEST_F(LocalFactorsTest, FactorsThatTheShardHasLostSinceAreStateLost) {
  const auto asked = AskOverALoss();
  ExpectFailure(*asked, absl::StatusCode::kDataLoss, "of version 3, those fetched of version 0");
}

class LoneWorkerTest : public LocalFactorsTest {
 protected:
  LoneWorkerTest() : LocalFactorsTest(/*world_size=*/1) {}
};

TEST_F(LoneWorkerTest, GoesOnWithTheFactorsOfAShardThatLostOthers) {
  const auto asked = AskOverALoss();
  const auto outcome = asked->answer->Wait();
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->factor_version, 0u);
}

TEST_F(LoneWorkerTest, FetchesWhatAShardHasThatCountsVersionsAnew) {
  shard_->Update(0);
  const auto before = Ask(1);
  GiveFactors(*AwaitFetch(0));
  ExpectAnswer(*before);
  shard_ = std::make_unique<Shard>(spec_);
  shard_->Update(1000);  // the version that the worker has, of other factors
  factors_->Refetch(0);
  const auto after = Ask(3);
  GiveFactors(*AwaitFetch(1));
  ExpectAnswer(*after);
}

TEST_F(LoneWorkerTest, FetchesAgainWhatWasOnItsWay) {
  factors_->Need(0);
  const auto on_its_way = AwaitFetch(0);
  factors_->Refetch(0);
  GiveFactors(*on_its_way);
  shard_->Update(0);
  const auto asked = Ask(1);
  GiveFactors(*AwaitFetch(1));
  ExpectAnswer(*asked);
}

TEST_F(LocalFactorsTest, AFetchThatFailsWhileAGradientIsSubmittedFailsIt) {
  factors_ = LocalFactors::MakeWith(spec_, *MethodSet::Make(spec_), *MakeCpuBackend({}), /*threads=*/0, "session job",
                                    [this](int64_t, const std::shared_ptr<AnswerSink>& sink) {
                                      sink->Fail(absl::DeadlineExceededError("gone"));
                                      while (factors_->Work()) {
                                      }
                                    });
  EXPECT_TRUE(absl::IsDeadlineExceeded(Ask(1)->answer->Wait().status()));
}

TEST_F(LocalFactorsTest, ARefusedPullIsMadeUpForByAFetch) {
  factors_->Need(0);
  GiveFactors(*AwaitFetch(0));
  const auto pull = factors_->ExpectUpdate(0, 0);
  const auto asked = Ask(0);
  shard_->Update(0);
  pull->Fail(ReasonedStatus(absl::StatusCode::kAborted, ErrorReason::kStaleStep, "retired"));
  GiveFactors(*AwaitFetch(1));
  ExpectAnswer(*asked);
}

TEST_F(LocalFactorsTest, AnAnswerThatDoesNotComeFailsTheStepAndTheNextOneFetches) {
  shard_->Update(1000);
  factors_->Need(0);
  GiveFactors(*AwaitFetch(0));
  const auto pull = factors_->ExpectUpdate(0, 0);
  const auto asked = Ask(0);
  pull->Fail(absl::DeadlineExceededError("too late"));
  ExpectFailure(*asked, absl::StatusCode::kDeadlineExceeded, "too late");
  shard_->Update(0);
  const auto next = Ask(1);
  const auto fetch = AwaitFetch(1);
  fetch->Fail(absl::DeadlineExceededError("still gone"));
  ExpectFailure(*next, absl::StatusCode::kDeadlineExceeded, "still gone");
  const auto last = Ask(1);
  GiveFactors(*AwaitFetch(2));
  ExpectAnswer(*last);
}

TEST_F(LocalFactorsTest, DamagedFactorsFailTheStep) {
  shard_->Update(1000);
  std::string damaged = shard_->Saved();
  damaged[damaged.size() / 2] ^= 1;
  const auto asked = Ask(1);
  Deliver(*AwaitFetch(0), 1, {}, damaged);
  ExpectFailure(*asked, absl::StatusCode::kDataLoss, "layer");
}

TEST_F(LocalFactorsTest, AGradientThatIsNotFiniteIsSkipped) {
  const auto asked = Ask(1);
  GiveFactors(*AwaitFetch(0));
  ASSERT_TRUE(asked->answer->Wait().ok());
  auto poisoned = std::make_unique<Asked>();
  poisoned->gradient.assign(kRows * kCols, std::numeric_limits<float>::quiet_NaN());
  const MatrixView view(poisoned->gradient.data(), kRows, kCols);
  poisoned->answer = std::make_shared<State>("gradient", view, false, false);
  factors_->Precondition(1, 0, view, view, poisoned->answer);
  EXPECT_EQ(poisoned->answer->Wait()->decision, Decision::kSkip);
}

TEST_F(LocalFactorsTest, GoesOnWithItsFactorsAfterFirstOrder) {
  shard_->Update(1000);
  const auto before = Ask(1);
  GiveFactors(*AwaitFetch(0));
  ExpectAnswer(*before);
  factors_->Need(0);
  ExpectAnswer(*Ask(21));
  EXPECT_EQ(fetches(), 1u);
}

TEST_F(LocalFactorsTest, ARefusedPullThatIsNotOverFailsItsStep) {
  factors_->Need(0);
  GiveFactors(*AwaitFetch(0));
  const auto pull = factors_->ExpectUpdate(0, 0);
  pull->Fail(absl::InternalError("the answer cannot be repeated"));
  ExpectFailure(*Ask(0), absl::StatusCode::kInternal, "cannot be repeated");
  shard_->Update(0);
  const auto next = Ask(1);
  GiveFactors(*AwaitFetch(1));
  ExpectAnswer(*next);
}

TEST_F(LocalFactorsTest, AStepIsExpectedOnceAtATime) {
  factors_->Need(0);
  GiveFactors(*AwaitFetch(0));
  const auto pull = factors_->ExpectUpdate(0, 0);
  EXPECT_EQ(factors_->ExpectUpdate(0, 0), nullptr);
  factors_->CancelUpdate(0, 0);
  const auto again = factors_->ExpectUpdate(0, 0);
  ASSERT_NE(again, nullptr);
  const auto asked = Ask(0);
  DeliverVectors(*again, 1, shard_->Update(0));
  ExpectAnswer(*asked);
  EXPECT_EQ(fetches(), 1u);
}

TEST_F(LocalFactorsTest, TheEndAnswersWhatIsLeft) {
  const auto waiting = Ask(1);
  factors_->Fail(absl::AbortedError("the job has gone back"));
  ExpectFailure(*waiting, absl::StatusCode::kAborted, "gone back");
  ExpectFailure(*Ask(1), absl::StatusCode::kAborted, "gone back");
  factors_->Stop();
  AwaitFetch(0)->Fail(absl::CancelledError(""));  // comes after all calls have ended
}

TEST_F(LocalFactorsTest, ChecksumsAreOfTheFactorsAfterWhatIsExpected) {
  const auto checksum = [this] { return factors_->Checksum(0, MonotonicNow() + kLong); };
  EXPECT_EQ(*checksum(), 0u) << "there are none";
  shard_->Update(1000);
  factors_->Need(0);
  GiveFactors(*AwaitFetch(0));
  EXPECT_EQ(*checksum(), SavedChecksum(shard_->Saved()));
  const auto pull = factors_->ExpectUpdate(0, 2);
  EXPECT_EQ(factors_->Checksum(0, MonotonicNow()).status().code(), absl::StatusCode::kDeadlineExceeded);
  std::thread later([&] { DeliverVectors(*pull, 2, shard_->Update(2)); });
  const absl::StatusOr<uint64_t> after = checksum();
  later.join();
  EXPECT_EQ(*after, SavedChecksum(shard_->Saved()));
  ExpectAnswer(*Ask(3));
  // One bit of one vector.
  std::vector<float> other = shard_->Update(4);
  other[0] = std::nextafter(other[0], 10.0f);
  DeliverVectors(*factors_->ExpectUpdate(0, 4), 3, other);
  const absl::StatusOr<uint64_t> parted = checksum();
  EXPECT_NE(*parted, SavedChecksum(shard_->Saved()));
  factors_->Fail(absl::AbortedError("gone back"));
  EXPECT_EQ(checksum().status().code(), absl::StatusCode::kAborted);
}

TEST(FactorUpdateSinkTest, BelievesOnlyWhatCanCome) {
  const FactorUpdateSink::Limits limits{.dims = {kCols, kRows}, .most_rows = 2, .most_bytes = 100};
  std::vector<absl::StatusOr<FactorUpdate>> done;
  FactorUpdateSink sink("update", limits,
                        [&](absl::StatusOr<FactorUpdate> handed) { done.push_back(std::move(handed)); });
  const auto message = [](const absl::Status& status) { return std::string(status.message()); };
  const wire::TensorFormat a{DType::kF32, {2, kCols}, 1}, g{DType::kF32, {2, kRows}, 1};
  EXPECT_THAT(message(sink.Begin({}, 101)), HasSubstr("at most 100 bytes, got 101"));
  EXPECT_THAT(message(sink.Begin({a}, 24)), HasSubstr("expected a and g, got 1 tensors"));
  EXPECT_THAT(message(sink.Begin({a, {DType::kF32, {3, kRows}, 1}}, 72)), HasSubstr("g: expected F32 [k, 4]"));
  EXPECT_THAT(message(sink.Begin({{DType::kF16, {2, kCols}, 1}, g}, 44)), HasSubstr("a: expected F32 [k, 3]"));
  EXPECT_THAT(message(sink.Begin({a, g}, 55)), HasSubstr("expected 56 bytes, got 55"));
  ASSERT_TRUE(sink.Begin({a, g}, 56).ok());
  EXPECT_THAT(message(sink.Append(8, Received("xxxx"))),
              HasSubstr("expected bytes from 0 to at most 56, got 4 from 8"));
  ASSERT_TRUE(sink.Append(0, Received(std::string(50, 'x'))).ok());
  EXPECT_THAT(message(sink.Append(50, Received("1234567"))), HasSubstr("got 7 from 50"));
  sink.Restart();
  ASSERT_TRUE(sink.Begin({a, g}, 56).ok());
  ASSERT_TRUE(sink.Append(0, Received(std::string(56, 'y'))).ok());
  EXPECT_FALSE(sink.ready());
  EXPECT_TRUE(sink.Complete({Decision::kPreconditioned, 7, 0, "why"}));
  EXPECT_FALSE(sink.Fail(absl::CancelledError("")));
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0]->factor_version, 7u);
  EXPECT_THAT(done[0]->rows, ElementsAre(2, 2));
  EXPECT_EQ(done[0]->bytes, std::string(56, 'y'));
}

}  // namespace
}  // namespace precondor
