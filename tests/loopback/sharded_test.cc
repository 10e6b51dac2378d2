// SPDX-License-Identifier: Apache-2.0
// SHARDED against whole servers over TCP: each rank sends its parts of a gradient and gets its parts of the answer that
// DELEGATE gives to the whole gradient, bit for bit.
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "precondor/client.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/normal_floats.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kRanks = 4;
constexpr int64_t kRows = 6, kCols = 9;

// How the ranks divide [kRows, kCols].
using Division = std::function<std::vector<GradientPart>(uint32_t rank)>;

// As fully_shard: the last rank has nothing.
std::vector<GradientPart> ByRows(uint32_t rank) {
  if (rank == 3) return {};
  return {{.row = 2 * rank, .rows = 2, .cols = kCols}};
}
// As tensor parallelism divides inputs, with a bias in the last column, which every rank has.
std::vector<GradientPart> ByColumns(uint32_t rank) {
  return {{.rows = kRows, .col = 2 * rank, .cols = 2}, {.rows = kRows, .col = 8, .cols = 1, .sent = rank == 0}};
}
// As fully_shard with replicas: rank 1 has what rank 0 has, and rank 3 what rank 2 has.
std::vector<GradientPart> WithReplicas(uint32_t rank) {
  return {{.row = rank < 2 ? 0 : 4, .rows = rank < 2 ? 4 : 2, .cols = kCols, .sent = rank % 2 == 0}};
}

std::vector<float> Cut(const std::vector<float>& whole, const std::vector<GradientPart>& parts, bool sent_alone) {
  std::vector<float> values;
  for (const GradientPart& part : parts) {
    if (sent_alone && !part.sent) continue;
    for (int64_t row = part.row; row < part.row + part.rows; ++row) {
      const auto begin = whole.begin() + row * kCols + part.col;
      values.insert(values.end(), begin, begin + part.cols);
    }
  }
  return values;
}

std::vector<float> GradientOf(uint64_t step) { return Normal(kRows * kCols, 100 + step); }

struct Answer {
  Decision decision = Decision::kSkip;
  uint64_t factor_version = 0;
  std::vector<float> values;
  std::string reason;
  bool operator==(const Answer&) const = default;
};

class ShardedTest : public ::testing::Test {
 protected:
  ShardedTest() {
    spec_.name = "job";
    spec_.world_size = kRanks;
    spec_.exchange = ExchangeMode::kSharded;
    spec_.inv_freq = 2;
    spec_.warmup_steps = 2;
    spec_.sketches = 2;
    spec_.layers = {{.name = "layer", .d_out = kRows, .d_in = kCols, .has_bias = false}};
  }

  void Start(const SessionSpec& spec) {
    workers_.clear();
    client_.reset();
    coordinator_.reset();
    shard_.reset();
    config_.role = ServerRole::kShard;
    config_.data_dir = absl::StrCat(data_.path(), "/", ++shards_);
    config_.listen = {"127.0.0.1:0"};
    shard_ = std::make_unique<RawServer>(config_);
    config_.listen = {shard_->address()};
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 20;
    coordinator.shards = {config_.listen[0]};
    coordinator_ = std::make_unique<RawServer>(coordinator);
    client_ = ConnectTo(coordinator_->address());
    ASSERT_TRUE(client_->OpenSession(spec).ok());
    Join(1);
  }
  void Join(uint64_t incarnation) {
    workers_.clear();
    workers_ = JoinAll(*client_, spec_, incarnation);
  }
  // As SIGKILL, and a new process over the same directory.
  void Restart() {
    shard_.reset();
    shard_ = std::make_unique<RawServer>(config_);
  }

  void SendStatistics(uint64_t step) {
    for (const auto& worker : workers_) {
      if (!worker->NeedsStatistics(step, 0)) continue;
      const std::vector<float> a = Normal(2 * kCols, step * 10 + worker->session().rank),
                               g = Normal(2 * kRows, step + 50);
      ASSERT_TRUE(
          worker->SendStatistics(step, 0, ConstMatrixView(a.data(), 2, kCols), ConstMatrixView(g.data(), 2, kRows), 1)
              .ok());
    }
  }
  PreconditionFuture Send(uint64_t step, uint32_t rank, const std::vector<GradientPart>& parts,
                          const std::vector<float>& whole) {
    sent_[rank] = Cut(whole, parts, true);
    got_[rank].assign(static_cast<size_t>(ReceivedElements(parts)), 7.0f);
    return workers_[rank]->Precondition(
        step, 0,
        {parts, ConstMatrixView(sent_[rank].data(), 1, static_cast<int64_t>(sent_[rank].size())),
         MatrixView(got_[rank].data(), 1, static_cast<int64_t>(got_[rank].size()))},
        1);
  }
  Answer Take(uint32_t rank, const PreconditionFuture& future) {
    const absl::StatusOr<Preconditioned> outcome = future.Wait();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    if (!outcome.ok()) return {};
    return {outcome->decision, outcome->factor_version, got_[rank], outcome->reason};
  }
  // The answers of a step, by rank.
  std::vector<Answer> Step(uint64_t step, const Division& division, const std::vector<float>& whole) {
    SendStatistics(step);
    std::vector<PreconditionFuture> futures;
    for (uint32_t rank = 0; rank < kRanks; ++rank) futures.push_back(Send(step, rank, division(rank), whole));
    std::vector<Answer> answers;
    for (uint32_t rank = 0; rank < kRanks; ++rank) answers.push_back(Take(rank, futures[rank]));
    Report(step);
    return answers;
  }
  void Report(uint64_t step) {
    for (const auto& worker : workers_) EXPECT_TRUE(worker->ReportStep(step, 1.0, 1, true, 0.1).Wait().ok());
  }
  // The whole answers of DELEGATE to the same steps.
  std::vector<Answer> Delegated(SessionSpec spec, uint64_t steps) {
    spec.exchange = ExchangeMode::kDelegate;
    Start(spec);
    std::vector<Answer> answers;
    for (uint64_t step = 0; step < steps; ++step) {
      SendStatistics(step);
      std::vector<float> values = GradientOf(step);
      const MatrixView view(values.data(), kRows, kCols);
      const auto outcome = workers_[0]->Precondition(step, 0, {view, view}, 1).Wait();
      EXPECT_TRUE(outcome.ok()) << outcome.status();
      answers.push_back({outcome->decision, outcome->factor_version, values, outcome->reason});
      Report(step);
    }
    return answers;
  }

  TempDir data_;
  int shards_ = 0;
  ServerConfig config_;  // of the shard
  SessionSpec spec_;
  std::unique_ptr<RawServer> shard_, coordinator_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<float> sent_[kRanks], got_[kRanks];
};

TEST_F(ShardedTest, EachRankGetsItsPartsOfTheAnswer) {
  const std::pair<const char*, Division> divisions[] = {
      {"rows", ByRows}, {"columns", ByColumns}, {"replicas", WithReplicas}};
  for (const char* method : {"mkor", "kfac", "soap", "muon"}) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      spec_.method.name = method;
      spec_.gradient_dtype = dtype;
      const std::vector<Answer> whole = Delegated(spec_, 6);
      for (const auto& [name, division] : divisions) {
        SCOPED_TRACE(absl::StrCat(method, " ", DTypeName(dtype), " by ", name));
        Start(spec_);
        for (uint64_t step = 0; step < whole.size(); ++step) {
          const std::vector<Answer> answers = Step(step, division, GradientOf(step));
          for (uint32_t rank = 0; rank < kRanks; ++rank) {
            Answer expected = whole[step];
            expected.values = Cut(expected.values, division(rank), false);
            EXPECT_EQ(answers[rank], expected) << "rank " << rank << " step " << step;
          }
        }
      }
    }
  }
}

TEST_F(ShardedTest, AShardThatComesBackChangesNoBit) {
  const std::vector<Answer> whole = Delegated(spec_, 8);
  Start(spec_);
  for (uint64_t step = 0; step < whole.size(); ++step) {
    SendStatistics(step);
    std::vector<PreconditionFuture> futures;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      futures.push_back(Send(step, rank, ByColumns(rank), GradientOf(step)));
      if (step % 2 == 1 && rank == step % kRanks) Restart();
    }
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(Take(rank, futures[rank]).values, Cut(whole[step].values, ByColumns(rank), false)) << step;
    }
    Report(step);
  }
}

TEST_F(ShardedTest, PartsThatOverlapAreRefusedAndChangeNothing) {
  Start(spec_);
  const std::vector<float> whole = GradientOf(0);
  SendStatistics(0);
  std::vector<PreconditionFuture> futures;
  for (uint32_t rank = 0; rank < 3; ++rank) futures.push_back(Send(0, rank, ByRows(rank), whole));
  for (const auto& worker : workers_) EXPECT_TRUE(worker->Flush().ok());  // the others' parts are there
  EXPECT_THAT(Send(0, 3, {{.row = 1, .rows = 1, .cols = 4}}, whole).Wait(),
              StatusIs(absl::StatusCode::kInvalidArgument, ErrorReason::kShapeMismatch,
                       HasSubstr("parts: expected at most 0 elements that other ranks have not sent, got 4")));
  EXPECT_EQ(Take(3, Send(0, 3, {}, whole)).decision, Decision::kPreconditioned);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(Take(rank, futures[rank]).decision, Decision::kPreconditioned);
  }
}

TEST_F(ShardedTest, AllRanksSkipAStepThatLacksAPart) {
  Start(spec_);
  const auto expect_skip = [this](uint64_t step, const Division& division, const std::vector<float>& whole,
                                  const std::string& reason) {
    for (const Answer& answer : Step(step, division, whole)) {
      EXPECT_EQ(answer.decision, Decision::kSkip);
      EXPECT_THAT(answer.reason, HasSubstr(reason));
    }
  };
  const auto without_a_row = [](uint32_t rank) {
    return rank == 1 ? std::vector<GradientPart>{{.row = 2, .rows = 1, .cols = kCols}} : ByRows(rank);
  };
  expect_skip(0, without_a_row, GradientOf(0), "the ranks' parts have 45 elements, of the gradient's 54");
  const auto twice = [](uint32_t rank) {
    return rank == 1 ? std::vector<GradientPart>{{.row = 1, .rows = 2, .cols = kCols}} : ByRows(rank);
  };
  expect_skip(1, twice, GradientOf(1), "the ranks' parts have 54 elements, some twice, of the gradient's 54");
  std::vector<float> broken = GradientOf(2);
  broken[20] = std::numeric_limits<float>::quiet_NaN();
  expect_skip(2, ByRows, broken, "rank 1");
  for (const Answer& answer : Step(3, ByRows, GradientOf(3))) EXPECT_EQ(answer.decision, Decision::kPreconditioned);
}

TEST_F(ShardedTest, RanksThatBeginAgainMayDivideTheGradientInAnotherWay) {
  Start(spec_);
  SendStatistics(0);
  Send(0, 0, WithReplicas(0), GradientOf(0));
  EXPECT_TRUE(workers_[0]->Flush().ok());
  Join(2);
  // The contribution of the process before counts, and has more samples than rank 0 has now.
  for (const Answer& answer : Step(0, ByRows, GradientOf(0))) EXPECT_EQ(answer.decision, Decision::kSkip);
  for (const Answer& answer : Step(1, ByRows, GradientOf(1))) EXPECT_EQ(answer.decision, Decision::kPreconditioned);
}

TEST_F(ShardedTest, PartsOfTheAnswerThatDifferHaveALimit) {
  Start(spec_);
  SendStatistics(0);
  std::vector<PreconditionFuture> futures;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    // All of the answer, each rank by another list.
    std::vector<GradientPart> parts = ByRows(rank);
    const int64_t end = parts.empty() ? 0 : parts[0].row + 2;
    if (end > 2) parts.insert(parts.begin(), {.rows = end - 2, .cols = kCols, .sent = false});
    if (end < kRows) parts.push_back({.row = end, .rows = kRows - end, .cols = kCols, .sent = false});
    futures.push_back(Send(0, rank, parts, GradientOf(0)));
  }
  int answered = 0;
  for (const PreconditionFuture& future : futures) {
    const absl::Status status = future.Wait().status();
    answered += status.ok() ? 1 : 0;
    if (status.ok()) continue;
    EXPECT_EQ(GetErrorReason(status), ErrorReason::kShapeMismatch) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("elements of the answer, expected at most 108"));
  }
  EXPECT_EQ(answered, 2);
}

TEST_F(ShardedTest, InFirstOrderNothingIsSent) {
  spec_.fallback.policy = FallbackPolicy::kAtStep;
  spec_.fallback.at_step = 1;
  Start(spec_);
  uint64_t step = 0;
  for (; workers_[0]->ModeOf(step) == Mode::kSecondOrder; ++step) Step(step, ByRows, GradientOf(step));
  const int64_t before = workers_[0]->status().traffic.gradient_bytes;
  for (const Answer& answer : Step(step, ByRows, GradientOf(step))) {
    EXPECT_EQ(answer.decision, Decision::kIdentity);
    EXPECT_THAT(answer.values, ::testing::Each(7.0f)) << "the rank has its averages already";
  }
  EXPECT_EQ(workers_[0]->status().traffic.gradient_bytes, before);
}

TEST_F(ShardedTest, CallsOfAnotherExchangeAreRefused) {
  Start(spec_);
  std::vector<float> whole = GradientOf(0);
  const MatrixView view(whole.data(), kRows, kCols);
  const auto refused = [](const PreconditionFuture& future) { return std::string(future.Wait().status().message()); };
  EXPECT_THAT(refused(workers_[0]->Precondition(0, 0, {view, view}, 1)), HasSubstr("SHARDED takes parts of gradients"));
  const std::vector<GradientPart> outside = {{.row = 5, .rows = 2, .cols = 1}};
  EXPECT_THAT(refused(workers_[0]->Precondition(0, 0, {outside, view.Corner(1, 2), view.Corner(1, 2)}, 1)),
              HasSubstr("parts: expected at most 64 of [6, 9]"));
  EXPECT_THAT(refused(workers_[0]->Precondition(0, 0, {ByRows(0), view, view}, 1)),
              HasSubstr("gradient: expected [1, 18]"));
  spec_.exchange = ExchangeMode::kDelegate;
  Start(spec_);
  EXPECT_THAT(refused(Send(0, 0, ByRows(0), whole)), HasSubstr("parts: expected exchange SHARDED, got DELEGATE"));
}

}  // namespace
}  // namespace precondor
