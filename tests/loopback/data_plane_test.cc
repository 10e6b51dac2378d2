// SPDX-License-Identifier: Apache-2.0
// Gradients over communicators, against whole servers: the same answers on every rank, and over gRPC when a rank or a
// shard is lost, stops, or does not come.
#include <barrier>
#include <csignal>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "kernels/cuda/nccl_module.h"
#include "precondor/client.h"
#include "tests/loopback/plane_steps.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/child_process.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Shards with data directories, and their coordinator.
class DataPlaneTest : public ::testing::Test {
 protected:
  void Start(int shards, int64_t plane_timeout_ms = 60000) {
    plane_timeout_ms_ = plane_timeout_ms;
    std::vector<std::string> addresses;
    for (int s = 0; s < shards; ++s) {
      shards_.push_back(std::make_unique<RawServer>(ShardConfig(s)));
      addresses.push_back(absl::StrCat("127.0.0.1:", shards_.back()->app().port()));
    }
    StartCoordinator(std::move(addresses));
  }
  void StartCoordinator(std::vector<std::string> shards) {
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 20;
    coordinator.shards = std::move(shards);
    coordinator_ = std::make_unique<RawServer>(coordinator);
    ClientOptions options;
    options.coordinator = address();
    options.result_timeout = absl::Hours(1);  // the servers' time-out is to count
    auto connected = Client::Connect(options);
    ASSERT_TRUE(connected.ok()) << connected.status();
    client_ = *std::move(connected);
  }
  ServerConfig ShardConfig(int shard) const {
    ServerConfig config;
    config.plane_transport = plane_transport_;
    config.role = ServerRole::kShard;
    config.data_dir = absl::StrCat(data_.path(), "/", shard);
    config.plane_timeout_ms = plane_timeout_ms_;
    return config;
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", coordinator_->app().port()); }
  // As SIGKILL and a new process over the same directory.
  void Restart(size_t shard) {
    ServerConfig config = ShardConfig(static_cast<int>(shard));
    config.listen = {absl::StrCat("127.0.0.1:", shards_[shard]->app().port())};
    shards_[shard] = nullptr;
    shards_[shard] = std::make_unique<RawServer>(config);
  }
  double Metric(size_t shard, const std::string& name) {
    const std::string line = absl::StrCat(name, "{train_job=\"job\"} ");
    for (absl::string_view text : absl::StrSplit(shards_[shard]->app().metrics_text(), '\n')) {
      double value = -1;
      if (absl::ConsumePrefix(&text, line) && absl::SimpleAtod(text, &value)) return value;
    }
    return -1;
  }
  std::unique_ptr<Worker> Join(uint32_t rank, uint64_t incarnation = 1, uint64_t first_step = 0) {
    auto joined = client_->Join("job", {.rank = rank, .incarnation = incarnation, .first_step = first_step});
    EXPECT_TRUE(joined.ok()) << joined.status();
    return joined.ok() ? *std::move(joined) : nullptr;
  }

  // Every rank on a thread of its own, together at the beginning of each step. Answers by rank and step.
  using Answers = std::vector<std::vector<std::vector<PlaneAnswer>>>;
  using Hook = std::function<void(Worker& worker, uint64_t step)>;
  Answers Train(const SessionSpec& spec, uint64_t steps, const Hook& after = {}) {
    const auto opened = client_->OpenSession(spec);
    EXPECT_TRUE(opened.ok()) << opened.status();
    Answers answers(static_cast<size_t>(spec.world_size));
    std::barrier<> together(spec.world_size);
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < answers.size(); ++rank) {
      threads.emplace_back([&, rank] {
        const std::unique_ptr<Worker> worker = Join(rank);
        for (uint64_t step = 0; step < steps; ++step) {
          together.arrive_and_wait();
          auto answered = RunPlaneStep(*worker, step);
          EXPECT_TRUE(answered.ok()) << "rank " << rank << " step " << step << ": " << answered.status();
          answers[rank].push_back(answered.ok() ? *std::move(answered) : std::vector<PlaneAnswer>());
          together.arrive_and_wait();
          if (after) after(*worker, step);
        }
        together.arrive_and_wait();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return answers;
  }

  TempDir data_;
  int64_t plane_timeout_ms_ = 0;
  std::string plane_transport_ = "local";
  std::vector<std::unique_ptr<RawServer>> shards_;
  std::unique_ptr<RawServer> coordinator_;
  std::unique_ptr<Client> client_;
};

// The average of method identity, as docs/collective.md has it: shares in f32, added in rank order, 0 of the shard.
std::vector<PlaneAnswer> Averages(const SessionSpec& spec, uint64_t step) {
  double total = 0;
  for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
    total += static_cast<double>(PlaneSamples(rank));
  }
  std::vector<PlaneAnswer> averages(spec.layers.size());
  for (size_t layer = 0; layer < averages.size(); ++layer) {
    std::vector<float>& sum = averages[layer].values;
    for (uint32_t rank = 0; rank < static_cast<uint32_t>(spec.world_size); ++rank) {
      const auto share = static_cast<float>(static_cast<double>(PlaneSamples(rank)) / total);
      const std::vector<float> gradient = PlaneGradient(spec.layers[layer], step, rank);
      sum.resize(gradient.size());
      for (size_t i = 0; i < sum.size(); ++i) {
        volatile float term = share * gradient[i];
        sum[i] = rank == 0 ? term : sum[i] + term;
      }
    }
    for (float& value : sum) value += 0.0f;
    averages[layer].decision = Decision::kIdentity;
  }
  return averages;
}

// By checksums, which tell bits apart.
std::vector<std::vector<uint64_t>> Checksums(const std::vector<std::vector<std::vector<PlaneAnswer>>>& answers) {
  std::vector<std::vector<uint64_t>> sums;
  for (const auto& steps : answers) {
    sums.emplace_back();
    for (const auto& step : steps) sums.back().push_back(PlaneChecksum(step));
  }
  return sums;
}

std::vector<uint64_t> ExpectedChecksums(const SessionSpec& spec, uint64_t steps) {
  std::vector<uint64_t> sums;
  for (uint64_t step = 0; step < steps; ++step) sums.push_back(PlaneChecksum(Averages(spec, step)));
  return sums;
}

TEST_F(DataPlaneTest, EveryRankGetsTheSumInRankOrder) {
  Start(2);
  const SessionSpec spec = PlaneSpec(3);
  const Answers answers = Train(spec, 4, [&](Worker& worker, uint64_t step) {
    EXPECT_TRUE(worker.DataPlaneStatus().ok()) << worker.DataPlaneStatus();
    int64_t elements = 0;
    for (const LayerSpec& layer : spec.layers) elements += layer.d_out * layer.d_in;
    EXPECT_EQ(worker.traffic().plane_bytes, 8 * elements * static_cast<int64_t>(step + 1)) << "nothing over gRPC";
    EXPECT_EQ(worker.traffic().gradient_bytes + worker.traffic().result_bytes, worker.traffic().plane_bytes);
    for (size_t shard = 0; shard < 2; ++shard) EXPECT_EQ(Metric(shard, "precondor_data_plane_status"), 1);
  });
  for (const std::vector<uint64_t>& rank : Checksums(answers)) EXPECT_EQ(rank, ExpectedChecksums(spec, 4));
  for (size_t shard = 0; shard < 2; ++shard) {
    EXPECT_TRUE(WaitUntil([&] { return Metric(shard, "precondor_data_plane_status") == 0; }));
    EXPECT_EQ(Metric(shard, "precondor_data_plane_failures_total"), 0) << "ranks that leave are no failure";
  }
}

TEST_F(DataPlaneTest, PreconditionsAsOverGrpc) {
  Start(1);
  for (const char* method : {"mkor", "kron"}) {
    SessionSpec spec = PlaneSpec(2, method);
    const Answers summed = Train(spec, 5);
    ASSERT_TRUE(client_->CloseSession("job").ok());
    spec.data_plane = DataPlane::kGrpc;
    const Answers sent = Train(spec, 5, [](Worker& worker, uint64_t) { EXPECT_EQ(worker.traffic().plane_bytes, 0); });
    ASSERT_TRUE(client_->CloseSession("job").ok());
    EXPECT_EQ(Checksums(summed)[0], Checksums(summed)[1]);
    for (size_t step = 0; step < 5; ++step) {
      for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
        const PlaneAnswer &got = summed[0][step][layer], &want = sent[0][step][layer];
        EXPECT_EQ(got.decision, want.decision);
        EXPECT_EQ(got.factor_version, want.factor_version);
        double error = 0, norm = 0;
        for (size_t i = 0; i < got.values.size(); ++i) {
          error += std::pow(static_cast<double>(got.values[i]) - want.values[i], 2);
          norm += std::pow(static_cast<double>(want.values[i]), 2);
        }
        EXPECT_LE(error, 1e-8 * norm) << method << " step " << step << " layer " << layer;
      }
    }
  }
}

TEST_F(DataPlaneTest, OneRankGetsItsGradientBackExactly) {
  Start(1);
  const SessionSpec spec = PlaneSpec(1);
  const Answers answers = Train(spec, 3);
  for (uint64_t step = 0; step < 3; ++step) {
    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
      EXPECT_EQ(answers[0][step][layer].values, PlaneGradient(spec.layers[layer], step, 0));
    }
  }
}

TEST_F(DataPlaneTest, BucketsFollowEachOther) {
  Start(1);
  SessionSpec spec = PlaneSpec(2);
  spec.layers[0].d_out = spec.layers[2].d_out = 4100;  // each more than a bucket holds
  spec.layers[0].d_in = spec.layers[2].d_in = 1030;
  const Answers answers = Train(spec, 2);
  for (const std::vector<uint64_t>& rank : Checksums(answers)) EXPECT_EQ(rank, ExpectedChecksums(spec, 2));
}

TEST_F(DataPlaneTest, AGradientThatIsMissingOrNotFiniteMakesAllSkip) {
  Start(1);
  ASSERT_TRUE(client_->OpenSession(PlaneSpec(2)).ok());
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Worker> worker = Join(rank);
      PlaneStep step(*worker, 0);
      step.gradient(1)[17] = rank == 1 ? std::numeric_limits<float>::infinity() : 1.0f;
      for (const size_t layer : {0, 1, 3}) ASSERT_TRUE(step.Send(layer).ok());
      ASSERT_TRUE((rank == 0 ? step.Abstain(2) : step.Send(2)).ok());
      const auto answers = step.Finish();
      ASSERT_TRUE(answers.ok()) << answers.status();
      EXPECT_EQ((*answers)[0].decision, Decision::kIdentity);
      EXPECT_EQ((*answers)[1].decision, Decision::kSkip);
      EXPECT_THAT((*answers)[1].reason, HasSubstr("rank 1 sent a payload that was not finite"));
      EXPECT_EQ((*answers)[2].decision, Decision::kSkip);
      EXPECT_THAT((*answers)[2].reason, HasSubstr("rank 0 abstained"));
      const auto next = RunPlaneStep(*worker, 1);
      ASSERT_TRUE(next.ok()) << next.status();
      EXPECT_EQ(PlaneChecksum(*next), PlaneChecksum(Averages(worker->spec(), 1)));
      EXPECT_TRUE(worker->DataPlaneStatus().ok()) << worker->DataPlaneStatus();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(DataPlaneTest, FirstOrderIsTheAverage) {
  Start(1);
  SessionSpec spec = PlaneSpec(2, "mkor");
  spec.fallback.policy = FallbackPolicy::kAtStep;
  spec.fallback.at_step = 2;
  const Answers answers = Train(spec, 5, [](Worker& worker, uint64_t) {
    EXPECT_TRUE(worker.DataPlaneStatus().ok()) << worker.DataPlaneStatus();
  });
  EXPECT_EQ(answers[0][1][0].decision, Decision::kPreconditioned);
  for (uint64_t step = 2; step < 5; ++step) {
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(PlaneChecksum(answers[rank][step]), PlaneChecksum(Averages(spec, step)));
    }
  }
}

// Ranks may send layers in any order, and the next step before they have looked at the answers of this one.
TEST_F(DataPlaneTest, TheOrderOfCallsIsEachRanksOwn) {
  Start(2);
  const SessionSpec spec = PlaneSpec(2);
  ASSERT_TRUE(client_->OpenSession(spec).ok());
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Worker> worker = Join(rank);
      PlaneStep first(*worker, 0), second(*worker, 1);
      std::vector<size_t> order = {0, 1, 2, 3};
      if (rank == 1) order = {2, 0, 3, 1};
      for (const size_t layer : order) ASSERT_TRUE(first.Send(layer).ok());
      for (const size_t layer : order) ASSERT_TRUE(second.Send(layer).ok());
      const auto answers = first.Finish();
      ASSERT_TRUE(answers.ok()) << answers.status();
      EXPECT_EQ(PlaneChecksum(*answers), PlaneChecksum(Averages(spec, 0)));
      const auto next = second.Finish();
      ASSERT_TRUE(next.ok()) << next.status();
      EXPECT_EQ(PlaneChecksum(*next), PlaneChecksum(Averages(spec, 1)));
      EXPECT_TRUE(worker->DataPlaneStatus().ok()) << worker->DataPlaneStatus();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A rank that waits for an answer before it sends the rest gets that answer over gRPC, and so do the other ranks.
TEST_F(DataPlaneTest, ARankThatWaitsInBetweenEndsTheCommunicatorAndNotTheJob) {
  Start(1, /*plane_timeout_ms=*/300);
  const SessionSpec spec = PlaneSpec(2);
  ASSERT_TRUE(client_->OpenSession(spec).ok());
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const std::unique_ptr<Worker> worker = Join(rank);
      PlaneStep step(*worker, 0);
      for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
        ASSERT_TRUE(step.Send(layer).ok());
        ASSERT_TRUE(step.Wait(layer).ok());
      }
      const auto answers = step.Finish();
      ASSERT_TRUE(answers.ok()) << answers.status();
      EXPECT_EQ(PlaneChecksum(*answers), PlaneChecksum(Averages(spec, 0)));
      EXPECT_FALSE(worker->DataPlaneStatus().ok());
      const auto next = RunPlaneStep(*worker, 1);
      ASSERT_TRUE(next.ok()) << next.status();
      EXPECT_EQ(PlaneChecksum(*next), PlaneChecksum(Averages(spec, 1)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(WaitUntil([&] { return Metric(0, "precondor_data_plane_failures_total") == 1; }));
}

TEST_F(DataPlaneTest, AShardThatIsLostEndsItsCommunicatorAndGivesTheSameAnswersOverGrpc) {
  Start(2);
  const SessionSpec spec = PlaneSpec(2);
  std::barrier<> both(2);
  const Answers answers = Train(spec, 5, [&](Worker& worker, uint64_t step) {
    if (step != 1) return;
    if (worker.rank() == 0) Restart(0);
    both.arrive_and_wait();
  });
  for (const std::vector<uint64_t>& rank : Checksums(answers)) EXPECT_EQ(rank, ExpectedChecksums(spec, 5));
}

// A rank that is another process.
class DataPlaneProcessTest : public DataPlaneTest {
 protected:
  std::unique_ptr<ChildProcess> StartRank(uint32_t rank, uint64_t incarnation, uint64_t first_step) {
    return std::make_unique<ChildProcess>(std::vector<std::string>{PRECONDOR_PLANE_RANK, address(), "job",
                                                                   absl::StrCat(rank), absl::StrCat(incarnation),
                                                                   absl::StrCat(first_step)});
  }
  // Has the process take its next step and this one's worker the same.
  std::pair<uint64_t, std::string> TakeStep(ChildProcess& process, Worker& worker, uint64_t step) {
    process.WriteLine("");
    const auto answers = RunPlaneStep(worker, step);
    EXPECT_TRUE(answers.ok()) << answers.status();
    return {answers.ok() ? PlaneChecksum(*answers) : 0, process.ReadLine().value_or("")};
  }
  std::string Line(uint64_t step, const std::string& way) const {
    return absl::StrCat(step, " ", PlaneChecksum(Averages(PlaneSpec(2), step)), " ", way);
  }
};

TEST_F(DataPlaneProcessTest, AKilledRankIsReplacedAndTheNextEpochHasACommunicatorAgain) {
  Start(1);
  const SessionSpec spec = PlaneSpec(2);
  ASSERT_TRUE(client_->OpenSession(spec).ok());
  std::unique_ptr<ChildProcess> process = StartRank(1, 1, 0);
  const std::unique_ptr<Worker> worker = Join(0);
  ASSERT_EQ(process->ReadLine(), "joined");
  for (uint64_t step = 0; step < 2; ++step) {
    const auto [mine, line] = TakeStep(*process, *worker, step);
    EXPECT_EQ(mine, PlaneChecksum(Averages(spec, step)));
    EXPECT_EQ(line, Line(step, "communicator"));
  }
  process->Signal(SIGKILL);
  PlaneStep alone(*worker, 2);
  ASSERT_TRUE(alone.SendAll().ok());
  EXPECT_TRUE(WaitUntil([&] { return Metric(0, "precondor_data_plane_failures_total") == 1; }));
  EXPECT_TRUE(WaitUntil([&] { return !worker->DataPlaneStatus().ok(); }));
  process = StartRank(1, 2, 2);
  ASSERT_EQ(process->ReadLine(), "joined");
  process->WriteLine("");
  const auto answers = alone.Finish();
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ(PlaneChecksum(*answers), PlaneChecksum(Averages(spec, 2)));
  EXPECT_THAT(process->ReadLine().value_or(""), HasSubstr(absl::StrCat("2 ", PlaneChecksum(*answers), " ")));
  EXPECT_EQ(worker->epoch(), 2u);
  const int64_t before = worker->traffic().plane_bytes;
  for (uint64_t step = 3; step < 5; ++step) {
    const auto [mine, line] = TakeStep(*process, *worker, step);
    EXPECT_EQ(mine, PlaneChecksum(Averages(spec, step)));
    EXPECT_EQ(line, Line(step, "communicator"));
  }
  EXPECT_GT(worker->traffic().plane_bytes, before);
}

TEST_F(DataPlaneProcessTest, ARankThatStopsAndGoesOnGetsTheAnswersOverGrpc) {
  Start(1, /*plane_timeout_ms=*/400);
  const SessionSpec spec = PlaneSpec(2);
  ASSERT_TRUE(client_->OpenSession(spec).ok());
  const std::unique_ptr<ChildProcess> process = StartRank(1, 1, 0);
  const std::unique_ptr<Worker> worker = Join(0);
  ASSERT_EQ(process->ReadLine(), "joined");
  EXPECT_EQ(TakeStep(*process, *worker, 0).second, Line(0, "communicator"));
  process->Signal(SIGSTOP);
  PlaneStep alone(*worker, 1);
  ASSERT_TRUE(alone.SendAll().ok());
  EXPECT_TRUE(WaitUntil([&] { return !worker->DataPlaneStatus().ok(); }));
  EXPECT_EQ(worker->DataPlaneStatus().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(worker->DataPlaneStatus().message()), HasSubstr("timed out waiting for rank 1"));
  EXPECT_FALSE(alone.ready(0));
  process->Signal(SIGCONT);
  process->WriteLine("");
  const auto answers = alone.Finish();
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ(PlaneChecksum(*answers), PlaneChecksum(Averages(spec, 1)));
  EXPECT_EQ(process->ReadLine(), Line(1, "gRPC"));
  EXPECT_EQ(TakeStep(*process, *worker, 2).second, Line(2, "gRPC"));
  EXPECT_EQ(worker->epoch(), 1u);
}

TEST_F(DataPlaneTest, NobodyWaitsForARankThatDeclines) {
  Start(1, /*plane_timeout_ms=*/3600000);
  ASSERT_TRUE(client_->OpenSession(PlaneSpec(2)).ok());
  v1::JoinSessionResponse joined;
  ASSERT_TRUE(coordinator_->Join("job", 1, kRawIncarnation, &joined).ok());
  const std::unique_ptr<Worker> worker = Join(0);
  PlaneStep step(*worker, 0);
  ASSERT_TRUE(step.SendAll().ok());
  v1::JoinPlaneRequest request;
  request.set_session_id(joined.session_id());
  request.set_epoch(worker->epoch());
  request.set_rank(1);
  request.set_incarnation(kRawIncarnation);
  request.set_secret(joined.secret());
  request.set_declined("on another host");
  v1::JoinPlaneResponse response;
  grpc::ClientContext context;
  SetDeadline(context);
  const grpc::Status declined = shards_[0]->data->JoinPlane(&context, request, &response);
  ASSERT_TRUE(declined.ok()) << declined.error_message();
  EXPECT_TRUE(WaitUntil([&] { return shards_[0]->Stats("job")[0].accepted() == 1; })) << "its gradient, over gRPC";
  EXPECT_FALSE(worker->DataPlaneStatus().ok());
  EXPECT_TRUE(WaitUntil([&] { return Metric(0, "precondor_data_plane_failures_total") == 1; }));
  request.clear_declined();
  grpc::ClientContext again;
  SetDeadline(again);
  EXPECT_THAT(shards_[0]->data->JoinPlane(&again, request, &response).error_message(),
              HasSubstr("the communicator has ended: rank 1 cannot take part: on another host"));
}

TEST_F(DataPlaneProcessTest, AKilledShardComesBackAndTheJobGoesOnOverGrpc) {
  const std::string shard_address = absl::StrCat("127.0.0.1:", FreePort());
  const auto start_shard = [&] {
    return std::make_unique<ChildProcess>(
        std::vector<std::string>{PRECONDOR_SERVER, "--role=shard", absl::StrCat("--listen=", shard_address),
                                 absl::StrCat("--data-dir=", data_.path()), "--backend=cpu", "--threads=2"},
        /*quiet=*/true);
  };
  std::unique_ptr<ChildProcess> shard = start_shard();
  StartCoordinator({shard_address});
  const SessionSpec spec = PlaneSpec(2);
  ASSERT_TRUE(WaitUntil([&] { return client_->OpenSession(spec).ok(); }));
  const std::unique_ptr<ChildProcess> process = StartRank(1, 1, 0);
  const std::unique_ptr<Worker> worker = Join(0);
  ASSERT_EQ(process->ReadLine(), "joined");
  EXPECT_EQ(TakeStep(*process, *worker, 0).second, Line(0, "communicator"));
  PlaneStep half(*worker, 1);
  for (const size_t layer : {0, 2, 3}) ASSERT_TRUE(half.Send(layer).ok());
  process->WriteLine("");
  shard->Signal(SIGKILL);
  ASSERT_TRUE(half.Send(1).ok());
  EXPECT_TRUE(WaitUntil([&] { return !worker->DataPlaneStatus().ok(); }));
  EXPECT_EQ(worker->DataPlaneStatus().code(), absl::StatusCode::kUnavailable) << worker->DataPlaneStatus();
  shard = start_shard();
  const auto answers = half.Finish();
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ(PlaneChecksum(*answers), PlaneChecksum(Averages(spec, 1)));
  EXPECT_EQ(process->ReadLine(), Line(1, "gRPC"));
  EXPECT_EQ(TakeStep(*process, *worker, 2).second, Line(2, "gRPC"));
}

// The shard is told to end when it has answered a part of a step and the other one is still to come.
TEST_F(DataPlaneTest, ADrainFinishesTheStepUnderWay) {
  Start(1);
  SessionSpec spec = PlaneSpec(2);
  spec.layers = {{"large", 2048, 1100, false}, {"other", 2048, 1100, false}};  // a bucket each, the last one first
  ASSERT_TRUE(client_->OpenSession(spec).ok());
  std::future<std::unique_ptr<Worker>> joining = std::async([this] { return Join(1); });
  const std::unique_ptr<Worker> one = Join(0), other = joining.get();
  PlaneStep first(*one, 0), second(*other, 0);
  ASSERT_TRUE(first.SendAll().ok());
  ASSERT_TRUE(second.Send(1).ok());
  ASSERT_TRUE(WaitUntil([this] {
    return absl::StrContains(shards_[0]->app().metrics_text(),
                             "precondor_results_total{decision=\"identity\",train_job=\"job\"} 1");
  }));
  EXPECT_THAT(shards_[0]->app().metrics_text(),
              HasSubstr("precondor_plans_total{decision=\"identity\",reason=\"no_factors\"} 1"));
  shards_[0]->app().RequestDrain(absl::Seconds(60));
  std::thread ending([this] { EXPECT_TRUE(shards_[0]->app().Wait().ok()); });
  EXPECT_TRUE(second.Send(0).ok());
  const std::vector<PlaneAnswer> expected = Averages(spec, 0);
  for (PlaneStep* step : {&first, &second}) {
    const absl::StatusOr<std::vector<PlaneAnswer>> answers = step->Finish();
    ASSERT_TRUE(answers.ok()) << answers.status();
    EXPECT_EQ(PlaneChecksum(*answers), PlaneChecksum(expected));
  }
  for (Worker* worker : {one.get(), other.get()}) {
    EXPECT_EQ(worker->traffic().plane_bytes, worker->traffic().gradient_bytes + worker->traffic().result_bytes);
  }
  ending.join();
}

// The shard's part when it is asked what it cannot give.
// Without a device of its own no rank can come to a communicator of NCCL's.
TEST_F(DataPlaneTest, RanksThatNcclDoesNotTakeGoOverGrpc) {
  if (const absl::Status found = FindNccl(); !found.ok()) GTEST_SKIP() << found;
  plane_transport_ = "nccl";
  Start(1);
  const SessionSpec spec = PlaneSpec(2);
  const Answers answers = Train(spec, 3, [](Worker& worker, uint64_t) {
    const absl::Status status = worker.DataPlaneStatus();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("communicator"));
    EXPECT_EQ(worker.traffic().plane_bytes, 0);
  });
  for (size_t step = 0; step < 3; ++step) {
    EXPECT_EQ(PlaneChecksum(answers[0][step]), PlaneChecksum(answers[1][step])) << step;
  }
}

TEST_F(DataPlaneTest, JoinPlaneTellsWhyNot) {
  Start(1);
  SessionSpec spec = PlaneSpec(2);
  spec.exchange = ExchangeMode::kDelegate;
  const absl::Status refused = client_->OpenSession(spec).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("exchange: expected DIRECT with data_plane COLLECTIVE"));
  spec = PlaneSpec(1);
  spec.data_plane = DataPlane::kGrpc;
  ASSERT_TRUE(client_->OpenSession(spec).ok());
  v1::JoinSessionResponse joined;
  ASSERT_TRUE(coordinator_->Join("job", 0, kRawIncarnation, &joined).ok());
  v1::JoinPlaneRequest request;
  request.set_session_id(joined.session_id());
  request.set_epoch(joined.epoch());
  request.set_incarnation(kRawIncarnation);
  request.set_secret(joined.secret());
  const auto ask = [&] {
    v1::JoinPlaneResponse response;
    grpc::ClientContext context;
    SetDeadline(context);
    return shards_[0]->data->JoinPlane(&context, request, &response);
  };
  EXPECT_EQ(ask().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(ask().error_message(), HasSubstr("data_plane is GRPC"));
  request.set_epoch(joined.epoch() + 1);
  EXPECT_EQ(DetailOf(ask()).reason(), v1::ERROR_REASON_FUTURE_EPOCH);
  request.set_session_id(99);
  EXPECT_EQ(DetailOf(ask()).reason(), v1::ERROR_REASON_UNKNOWN_SESSION);
}

}  // namespace
}  // namespace precondor
