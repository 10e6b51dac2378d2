// SPDX-License-Identifier: Apache-2.0
// REPLAY and PULL_FACTORS: workers that have the factors themselves, against whole servers over TCP. What DELEGATE
// answers is what they have to come to, bit for bit: there too the job's average is preconditioned, by the shard.
#include <atomic>
#include <barrier>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/error_reason.h"
#include "kernels/base/status_macros.h"
#include "kernels/methods/registry.h"
#include "precondor/client.h"
#include "precondor/statistics.h"
#include "precondor/v1/snapshot.grpc.pb.h"
#include "proto/wire/spec_codec.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/normal_floats.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

const std::vector<std::pair<int64_t, int64_t>> kShapes = {{5, 7}, {40, 33}, {16, 3}, {9, 120}};

// Shards, with data directories by default, and their coordinator.
class Cluster {
 public:
  explicit Cluster(int shards, bool on_disk = true) : on_disk_(on_disk) {
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 20;
    for (int s = 0; s < shards; ++s) {
      shards_.push_back(std::make_unique<RawServer>(ShardConfig(s)));
      coordinator.shards.push_back(shards_.back()->address());
    }
    coordinator_ = std::make_unique<RawServer>(coordinator);
    client_ = ConnectTo(coordinator_->address());
  }
  Client& client() { return *client_; }
  std::unique_ptr<Worker> Join(const SessionSpec& spec, uint32_t rank, uint64_t incarnation = 1,
                               uint64_t first_step = 0) {
    auto worker = client_->Join(spec.name, {.rank = rank, .incarnation = incarnation, .first_step = first_step});
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }
  RawServer& coordinator() { return *coordinator_; }
  RawServer& shard(size_t index) { return *shards_[index]; }
  // As SIGKILL and a new process over the same directory.
  void Restart(size_t shard) {
    ServerConfig config = ShardConfig(static_cast<int>(shard));
    config.listen = {shards_[shard]->address()};
    shards_[shard] = nullptr;
    shards_[shard] = std::make_unique<RawServer>(config);
  }
  // In its place one that has an empty directory.
  void Forget(size_t shard) {
    ++forgotten_;
    Restart(shard);
  }

 private:
  ServerConfig ShardConfig(int shard) const {
    ServerConfig config;
    config.role = ServerRole::kShard;
    if (on_disk_) config.data_dir = absl::StrCat(data_.path(), "/", shard, "-", forgotten_);
    return config;
  }

  const bool on_disk_;

  TempDir data_;
  int forgotten_ = 0;
  std::vector<std::unique_ptr<RawServer>> shards_;
  std::unique_ptr<RawServer> coordinator_;
  std::unique_ptr<Client> client_;
};

SessionSpec Spec(ExchangeMode exchange, int32_t world_size) {
  SessionSpec spec;
  spec.name = "test";
  spec.seed = 5;
  spec.world_size = world_size;
  spec.exchange = exchange;
  spec.sketches = 2;
  spec.inv_freq = 3;
  spec.warmup_steps = 3;
  spec.method.options["rank"] = 8.0;
  for (const auto& [d_out, d_in] : kShapes) {
    spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
  }
  return spec;
}

struct Answer {
  std::vector<float> values;
  Decision decision = Decision::kSkip;
  uint64_t factor_version = 0;
  double inner_product = 0;
  bool operator==(const Answer&) const = default;
};
using Step = std::vector<Answer>;  // by layer

void PrintTo(const Answer& answer, std::ostream* out) {
  *out << std::string(DecisionName(answer.decision)) << " of version " << answer.factor_version << ", <D, U> "
       << answer.inner_product << ", " << answer.values.size() << " values";
}

absl::Status SendStatistics(Worker& worker, uint64_t step, size_t layer) {
  const SessionSpec& spec = worker.session().spec;
  const int64_t index = static_cast<int64_t>(layer);
  const int64_t k = VectorsPerWorker(spec, index);
  const LayerSpec& shape = spec.layers[layer];
  const uint64_t seed = step * 1000 + layer * 100 + worker.session().rank;
  const std::vector<float> a = Normal(k * shape.d_in, seed), g = Normal(k * shape.d_out, seed + 50);
  return worker.SendStatistics(step, index, ConstMatrixView(a.data(), k, shape.d_in),
                               ConstMatrixView(g.data(), k, shape.d_out), 10 + worker.session().rank);
}

// One step of a rank: the same gradients, the job's average, on every rank.
absl::StatusOr<Step> RunStep(Worker& worker, uint64_t step) {
  const std::vector<LayerSpec>& layers = worker.session().spec.layers;
  Step answers(layers.size());
  std::vector<PreconditionFuture> futures(layers.size());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    const int64_t index = static_cast<int64_t>(layer);
    if (worker.NeedsStatistics(step, index)) PRECONDOR_RETURN_IF_ERROR(SendStatistics(worker, step, layer));
    if (!worker.SendsGradient(index)) continue;
    answers[layer].values = Normal(layers[layer].d_out * layers[layer].d_in, step * 10 + layer);
    const MatrixView view(answers[layer].values.data(), layers[layer].d_out, layers[layer].d_in);
    futures[layer] = worker.Precondition(step, index, {view, view}, 1);
  }
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    if (!worker.SendsGradient(static_cast<int64_t>(layer))) continue;
    PRECONDOR_ASSIGN_OR_RETURN(const Preconditioned outcome, futures[layer].Wait());
    answers[layer].decision = outcome.decision;
    answers[layer].factor_version = outcome.factor_version;
    answers[layer].inner_product = outcome.inner_product;
  }
  PRECONDOR_RETURN_IF_ERROR(worker.ReportStep(step, 1.0, 10, true, 0.1).Wait().status());
  return answers;
}

// An action of a test at the beginning of a rank's step; it may exchange the worker for another one.
using Hook = std::function<void(uint64_t step, std::unique_ptr<Worker>& worker)>;

// Answers by rank and step. Ranks that have factors have the same, bit for bit, after each step.
std::vector<std::vector<Step>> Train(Cluster& cluster, const SessionSpec& spec, uint64_t steps, const Hook& hook = {}) {
  EXPECT_TRUE(cluster.client().OpenSession(spec).ok());
  std::vector<std::vector<Step>> answers(static_cast<size_t>(spec.world_size));
  std::vector<std::vector<uint64_t>> checksums(answers.size());
  std::barrier<> together(spec.world_size);  // as the job's own average keeps its ranks
  ForEachRank(static_cast<uint32_t>(spec.world_size), [&](uint32_t rank) {
    std::unique_ptr<Worker> worker = cluster.Join(spec, rank);
    for (uint64_t step = 0; step < steps; ++step) {
      if (hook) hook(step, worker);
      absl::StatusOr<Step> answered = RunStep(*worker, step);
      EXPECT_TRUE(answered.ok()) << "rank " << rank << " step " << step << ": " << answered.status();
      answers[rank].push_back(answered.ok() ? *std::move(answered) : Step(spec.layers.size()));
      for (size_t layer = 0; layer < spec.layers.size() && WorkersPrecondition(spec); ++layer) {
        const auto checksum = worker->FactorsChecksum(static_cast<int64_t>(layer));
        EXPECT_TRUE(checksum.ok()) << checksum.status();
        checksums[rank].push_back(checksum.value_or(0));
        EXPECT_EQ(checksums[rank].back() != 0, TakesStatistics(spec, static_cast<int64_t>(layer)));
      }
      together.arrive_and_wait();
    }
    EXPECT_TRUE(worker->Flush().ok());
    EXPECT_EQ(worker->status().traffic.gradient_bytes > 0, !WorkersPrecondition(spec));
  });
  for (const std::vector<uint64_t>& one : checksums) EXPECT_EQ(one, checksums[0]);
  return answers;
}

// Rank 0 ... world_size - 1 of DELEGATE put together.
std::vector<Step> Delegated(SessionSpec spec, uint64_t steps) {
  Cluster cluster(1);
  spec.exchange = ExchangeMode::kDelegate;
  const std::vector<std::vector<Step>> answers = Train(cluster, spec, steps);
  std::vector<Step> whole(steps, Step(spec.layers.size()));
  for (uint64_t step = 0; step < steps; ++step) {
    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
      whole[step][layer] = answers[layer % answers.size()][step][layer];
    }
  }
  return whole;
}

void ExpectAll(const std::vector<std::vector<Step>>& answers, const std::vector<Step>& expected) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    ASSERT_EQ(answers[rank].size(), expected.size());
    for (size_t step = 0; step < expected.size(); ++step) {
      for (size_t layer = 0; layer < expected[step].size(); ++layer) {
        EXPECT_EQ(answers[rank][step][layer], expected[step][layer])
            << "rank " << rank << " step " << step << " layer " << layer;
      }
    }
  }
}

// The worker's process ends, and another one has its rank from that step on.
void BeginAgain(Cluster& cluster, const SessionSpec& spec, uint64_t step, std::unique_ptr<Worker>& worker) {
  const uint32_t rank = worker->session().rank;
  worker = nullptr;
  worker = cluster.Join(spec, rank, /*incarnation=*/step + 2, step);
}

class WorkerFactorsTest : public ::testing::TestWithParam<ExchangeMode> {
 protected:
  static constexpr uint64_t kSteps = 14;
};

TEST_P(WorkerFactorsTest, AnswersAreThoseOfTheShard) {
  std::map<std::string, MethodConfig> methods;
  methods["low rank"] = {.name = "mkor", .options = {{"rank", 8.0}, {"representation", std::string("LOW_RANK")}}};
  methods["dense"] = {.name = "mkor", .options = {{"representation", std::string("DENSE")}}};
  methods["blend"] = {.name = "mkor", .options = {{"rule", std::string("BLEND")}}};
  methods["eva"] = {.name = "eva", .options = {}};
  methods["identity"] = {.name = "identity", .options = {}};
  if (GetParam() == ExchangeMode::kPullFactors) {
    methods["eigen"] = {.name = "kfac", .options = {{"prediv", true}, {"inv_update_steps", 2.0}, {"refresh_lag", 1.0}}};
    methods["inverse"] = {.name = "kfac", .options = {{"form", std::string("INVERSE")}}};
  }
  for (const auto& [name, method] : methods) {
    for (const int32_t workers : {1, 4}) {
      SessionSpec spec = Spec(GetParam(), workers);
      spec.method = method;
      const std::vector<Step> expected = Delegated(spec, kSteps);
      for (const int shards : {1, 3}) {
        SCOPED_TRACE(absl::StrCat(name, ", ", workers, " workers, ", shards, " shards"));
        Cluster cluster(shards);
        ExpectAll(Train(cluster, spec, kSteps), expected);
      }
    }
  }
}

TEST_P(WorkerFactorsTest, LayersHaveTheirOwnMethods) {
  SessionSpec spec = Spec(GetParam(), 2);
  spec.layer_methods = {
      {.method = {.name = "identity", .options = {}}, .statistics = StatisticsKind::kMean, .layers = {1}},
      {.method = {.name = "eva", .options = {}}, .statistics = StatisticsKind::kMean, .layers = {2}}};
  const std::vector<Step> expected = Delegated(spec, kSteps);
  EXPECT_EQ(expected.back()[1].decision, Decision::kIdentity);
  EXPECT_NE(expected.back()[2].inner_product, 0) << "KL_CLIP";
  Cluster cluster(2);
  ExpectAll(Train(cluster, spec, kSteps), expected);
}

// A statistic step's answer, or its acknowledgement, or nothing, is lost with the shard.
TEST_P(WorkerFactorsTest, AShardThatComesBackChangesNoBit) {
  const SessionSpec spec = Spec(GetParam(), 2);
  const std::vector<Step> expected = Delegated(spec, 40);
  Cluster cluster(2);
  std::atomic<uint64_t> steps = 0;
  std::atomic<bool> over = false;
  std::atomic<uint64_t> restarts = 0;
  std::thread chaos([&] {
    for (uint64_t seen = 0; !over; std::this_thread::yield()) {
      if (steps < seen + 5) continue;
      seen = steps;
      cluster.Restart(seen % 2);
      ++restarts;
    }
  });
  const auto answers = Train(cluster, spec, 40, [&](uint64_t step, std::unique_ptr<Worker>&) {
    steps = step;
    while (restarts < step / 8) std::this_thread::yield();  // the machine may have other things to do
  });
  over = true;
  chaos.join();
  ExpectAll(answers, expected);
}

// Killed at the beginning of a step, and begun again there, at statistic steps and between them.
TEST_P(WorkerFactorsTest, AWorkerThatBeginsAgainGoesOnWithTheFactorsOfTheOthers) {
  const SessionSpec spec = Spec(GetParam(), 3);
  const std::vector<Step> expected = Delegated(spec, kSteps);
  Cluster cluster(2);
  ExpectAll(Train(cluster, spec, kSteps,
                  [&](uint64_t step, std::unique_ptr<Worker>& worker) {
                    if (worker->session().rank != step % 3 || step < 2) return;
                    EXPECT_TRUE(worker->Flush().ok());
                    BeginAgain(cluster, spec, step, worker);
                  }),
            expected);
}

// It had sent the step's statistics, and perhaps had its answer, when it was killed: what it sent stands.
TEST_P(WorkerFactorsTest, AWorkerThatWasKilledWithinAStepRepeatsIt) {
  const SessionSpec spec = Spec(GetParam(), 2);
  const std::vector<Step> expected = Delegated(spec, kSteps);
  Cluster cluster(2);
  ExpectAll(Train(cluster, spec, kSteps,
                  [&](uint64_t step, std::unique_ptr<Worker>& worker) {
                    if (worker->session().rank != 1 || step % 2 == 1) return;
                    for (size_t layer = 0; layer < spec.layers.size(); ++layer) {
                      if (worker->NeedsStatistics(step, static_cast<int64_t>(layer))) {
                        EXPECT_TRUE(SendStatistics(*worker, step, layer).ok());
                      }
                    }
                    if (step % 4 == 0) {
                      EXPECT_TRUE(worker->Flush().ok());
                    }
                    BeginAgain(cluster, spec, step, worker);
                  }),
            expected);
}

// The workers' copies are of no use to a shard that has lost its factors: no rank goes on alone, and all can begin
// again.
TEST_P(WorkerFactorsTest, FactorsThatAShardHasLostAreLostForAll) {
  SessionSpec spec = Spec(GetParam(), 2);
  spec.inv_freq = 1;
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().OpenSession(spec).ok());
  std::barrier<> together(2);
  std::vector<absl::Status> ends(2);
  std::vector<Step> after(2);
  ForEachRank(2, [&](uint32_t rank) {
    std::unique_ptr<Worker> worker = cluster.Join(spec, rank);
    for (uint64_t step = 0; ends[rank].ok(); ++step) {
      ends[rank] = RunStep(*worker, step).status();
      if (step != 2) continue;
      together.arrive_and_wait();
      if (rank == 0) cluster.Forget(0);
      together.arrive_and_wait();
    }
    worker.reset();
    together.arrive_and_wait();  // one that has the lost answers would tell the new ones that they are lost
    worker = cluster.Join(spec, rank, /*incarnation=*/2, 3);
    for (uint64_t step = 3; step < 6; ++step) {
      absl::StatusOr<Step> answered = RunStep(*worker, step);
      ASSERT_TRUE(answered.ok()) << answered.status();
      after[rank] = *std::move(answered);
    }
  });
  for (uint32_t rank : {0u, 1u}) {
    EXPECT_EQ(GetErrorReason(ends[rank]), ErrorReason::kStateLost) << ends[rank];
    EXPECT_EQ(after[rank], after[0]);
    for (const Answer& answer : after[rank]) EXPECT_EQ(answer.factor_version, 3u);
  }
}

// Ranks without vectors: the step goes on with the others', or changes nothing.
TEST_P(WorkerFactorsTest, AbstentionsAreFollowed) {
  const SessionSpec spec = Spec(GetParam(), 2);
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().OpenSession(spec).ok());
  const std::vector<std::unique_ptr<Worker>> workers = JoinAll(cluster.client(), spec);
  const auto version = [&](uint32_t rank, uint64_t step) {
    std::vector<float> gradient = Normal(5 * 7, step);
    const MatrixView view(gradient.data(), 5, 7);
    const auto outcome = workers[rank]->Precondition(step, 0, {view, view}, 1).Wait();
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    return outcome.ok() ? outcome->factor_version : 99;
  };
  ASSERT_TRUE(SendStatistics(*workers[0], 0, 0).ok());
  ASSERT_TRUE(workers[1]->AbstainStatistics(0, 0).ok());
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(version(rank, 0), 1u);
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(workers[rank]->AbstainStatistics(1, 0).ok());
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(version(rank, 1), 1u);
  for (uint32_t rank : {0u, 1u}) ASSERT_TRUE(SendStatistics(*workers[rank], 2, 0).ok());
  for (uint32_t rank : {0u, 1u}) EXPECT_EQ(version(rank, 2), 2u);
  // This rank's own affair.
  EXPECT_EQ(workers[1]->AbstainGradient(2, 1).Wait()->decision, Decision::kSkip);
}

TEST_P(WorkerFactorsTest, CallsOutOfOrderAreRefused) {
  const SessionSpec spec = Spec(GetParam(), 1);
  Cluster cluster(1);
  ASSERT_TRUE(cluster.client().OpenSession(spec).ok());
  const std::unique_ptr<Worker> worker = cluster.Join(spec, 0);
  std::vector<float> gradient = Normal(5 * 7, 1);
  const MatrixView view(gradient.data(), 5, 7);
  EXPECT_THAT(worker->Precondition(0, 0, {view, view}, 1).Wait(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("layer 0: expected the statistics of step 0")));
  ASSERT_TRUE(SendStatistics(*worker, 0, 0).ok());
  ASSERT_TRUE(SendStatistics(*worker, 1, 0).ok());
  EXPECT_THAT(worker->Precondition(0, 0, {view, view}, 1).Wait(),
              MessageIs(HasSubstr("before the statistics of step 1")));
  EXPECT_TRUE(worker->Precondition(1, 0, {view, view}, 1).Wait().ok());
}

INSTANTIATE_TEST_SUITE_P(Exchange, WorkerFactorsTest,
                         ::testing::Values(ExchangeMode::kReplay, ExchangeMode::kPullFactors),
                         [](const auto& info) { return std::string(ExchangeModeName(info.param)); });

// Payload bytes of one statistic step, to and from the service.
struct StepBytes {
  int64_t sent = 0;
  int64_t received = 0;
};

StepBytes BytesOfAStep(ExchangeMode exchange, int64_t d, int32_t workers) {
  SessionSpec spec = Spec(exchange, workers);
  spec.inv_freq = 1;
  spec.layers = {{"square", d, d, false}};
  Cluster cluster(1);
  std::vector<int64_t> sent, received;
  Train(cluster, spec, 12, [&](uint64_t step, std::unique_ptr<Worker>& worker) {
    if (worker->session().rank != 0) return;
    sent.push_back(worker->status().traffic.statistics_bytes);
    received.push_back(worker->status().traffic.result_bytes);
  });
  // Factors are fetched once, before the first step's answer.
  for (size_t step = 2; step < sent.size(); ++step) {
    EXPECT_EQ(sent[step] - sent[step - 1], sent[2] - sent[1]);
    EXPECT_EQ(received[step] - received[step - 1], received[2] - received[1]);
  }
  return {sent[2] - sent[1], received[2] - received[1]};
}

TEST(WorkerFactorsTrafficTest, ReplayMovesVectorsAlone) {
  for (const int32_t workers : {1, 4}) {
    for (const int64_t d : {32, 64, 128, 256}) {
      const StepBytes bytes = BytesOfAStep(ExchangeMode::kReplay, d, workers);
      // Two sketches of each side in f16 out; the sealed ones of all ranks in f32 back.
      EXPECT_EQ(bytes.sent, 2 * (d + d) * 2) << d;
      EXPECT_EQ(bytes.received, workers * 2 * (d + d) * 4) << d;
    }
  }
}

// --- factors that are read for a checkpoint, and restored ---

// Runs the steps from `first` to `last` - 1 of a job of one rank.
std::vector<Step> RunSteps(Worker& worker, uint64_t first, uint64_t last) {
  std::vector<Step> answers;
  for (uint64_t step = first; step < last; ++step) {
    absl::StatusOr<Step> answered = RunStep(worker, step);
    EXPECT_TRUE(answered.ok()) << "step " << step << ": " << answered.status();
    answers.push_back(answered.ok() ? *std::move(answered) : Step());
  }
  return answers;
}

std::vector<std::string> ReadAll(Worker& worker) {
  EXPECT_TRUE(worker.Flush().ok());
  std::vector<std::string> factors;
  for (size_t layer = 0; layer < worker.session().spec.layers.size(); ++layer) {
    absl::StatusOr<std::string> read = worker.ReadFactors(static_cast<int64_t>(layer));
    EXPECT_TRUE(read.ok()) << read.status();
    factors.push_back(read.value_or(""));
  }
  return factors;
}

// Returns the checkpoint of a job of one rank after its first four steps.
std::vector<std::string> FactorsOfFourSteps(Cluster& cluster, const SessionSpec& spec) {
  EXPECT_TRUE(cluster.client().OpenSession(spec).ok());
  const std::unique_ptr<Worker> worker = cluster.Join(spec, 0);
  RunSteps(*worker, 0, 4);
  return ReadAll(*worker);
}

class CheckpointTest : public ::testing::TestWithParam<std::string> {};

TEST_P(CheckpointTest, AJobResumesOnOtherServersBitwise) {
  for (const ExchangeMode exchange :
       {ExchangeMode::kDirect, ExchangeMode::kDelegate, ExchangeMode::kReplay, ExchangeMode::kPullFactors}) {
    SessionSpec spec = Spec(exchange, 1);
    spec.method = {.name = GetParam(), .options = {}};
    Cluster first(2, /*on_disk=*/false);
    if (!first.client().OpenSession(spec).ok()) continue;  // workers cannot hold the method's factors
    SCOPED_TRACE(ExchangeModeName(exchange));
    for (const uint64_t at : {4, 7}) {  // a statistic step is next, or not
      spec.name = absl::StrCat("test", at);
      ASSERT_TRUE(first.client().OpenSession(spec).ok());
      const std::unique_ptr<Worker> worker = first.Join(spec, 0);
      RunSteps(*worker, 0, at);
      const std::vector<std::string> factors = ReadAll(*worker);
      const std::vector<Step> expected = RunSteps(*worker, at, at + 7);
      Cluster second(3, /*on_disk=*/at == 7);
      const absl::Status restored = second.client().RestoreSession(spec, at, factors);
      ASSERT_TRUE(restored.ok()) << restored;
      const std::unique_ptr<Worker> resumed = second.Join(spec, 0, /*incarnation=*/1, at);
      EXPECT_EQ(ReadAll(*resumed), factors);
      ExpectAll({RunSteps(*resumed, at, at + 7)}, expected);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Methods, CheckpointTest, ::testing::Values("mkor", "eva", "kfac", "soap", "muon", "kron"));

TEST(CheckpointTest, RefusesWhatItCannotRestore) {
  Cluster cluster(1, /*on_disk=*/false);
  Client& client = cluster.client();
  const SessionSpec spec = Spec(ExchangeMode::kDirect, 1);
  EXPECT_THAT(client.RestoreSession(spec, 3, std::vector<std::string>(1)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expected the factors of 4 layers, got 1")));
  const absl::Status wrong = client.RestoreSession(spec, 3, std::vector<std::string>(spec.layers.size(), "wrong"));
  EXPECT_FALSE(wrong.ok());
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("layer \"layer0\""));
  const auto opened = client.OpenSession(spec);
  EXPECT_TRUE(opened.ok() && opened->created) << "nothing is left of it";
  EXPECT_TRUE(absl::IsFailedPrecondition(client.RestoreSession(spec, 3, std::vector<std::string>(spec.layers.size()))));
}

v1::RestoreSessionResponse BeginRestoring(Cluster& cluster, const v1::SessionSpec& spec) {
  v1::RestoreSessionRequest request;
  *request.mutable_spec() = spec;
  v1::RestoreSessionResponse opened;
  TimedContext context;
  EXPECT_TRUE(
      v1::SnapshotService::NewStub(cluster.coordinator().channel())->RestoreSession(&context, request, &opened).ok());
  return opened;
}

// Sends shard 0 a layer's factors, which are none.
grpc::StatusCode RestoreLayer(Cluster& cluster, uint64_t session_id, uint32_t layer, const std::string& secret) {
  v1::RestoreLayerRequest piece;
  piece.set_session_id(session_id);
  piece.set_layer(layer);
  piece.set_fetched(true);
  piece.set_secret(secret);
  v1::RestoreLayerResponse response;
  TimedContext context;
  return v1::SnapshotService::NewStub(cluster.shard(0).channel())
      ->RestoreLayer(&context, piece, &response)
      .error_code();
}

TEST(CheckpointTest, OnlyWhoShowsTheSecretRestoresALayer) {
  Cluster cluster(1, /*on_disk=*/false);
  const v1::RestoreSessionResponse opened = BeginRestoring(cluster, RawServer::Spec("job"));
  const auto restore = [&](const std::string& secret) { return RestoreLayer(cluster, opened.session_id(), 0, secret); };
  EXPECT_EQ(restore(""), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(restore(std::string(opened.secret().size(), 'x')), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(restore(opened.secret()), grpc::StatusCode::OK);
  EXPECT_EQ(restore(opened.secret()), grpc::StatusCode::OK) << "an answer may be lost, and the piece sent again";
}

TEST(CheckpointTest, AShardThatForgetsItsPartFailsTheRestore) {
  Cluster cluster(2, /*on_disk=*/false);
  const SessionSpec spec = Spec(ExchangeMode::kDirect, 1);
  const v1::RestoreSessionResponse opened = BeginRestoring(cluster, *wire::EncodeSessionSpec(spec));
  // Shard 0 has its part when it is restarted; shard 1 never gets its own.
  for (const v1::ShardAssignment& assignment : opened.shard_map().assignments()) {
    if (assignment.address() != cluster.shard(0).address()) continue;
    for (const uint32_t layer : assignment.layers()) {
      ASSERT_EQ(RestoreLayer(cluster, opened.session_id(), layer, opened.secret()), grpc::StatusCode::OK);
    }
  }
  cluster.Restart(0);
  const auto joined = cluster.client().Join(spec.name, {.rank = 0, .incarnation = 1, .first_step = 0});
  EXPECT_TRUE(absl::IsDataLoss(joined.status())) << joined.status();
  // The coordinator may ask for the part before it has installed the session again, or afterwards.
  EXPECT_THAT(joined, MessageIs(AllOf(
                          HasSubstr("could not be restored as of step 0; close it: shard 127.0.0.1:"),
                          AnyOf(HasSubstr("restarted while the session was restored"), HasSubstr("no such session")))));
}

// Begins a session with factors, and waits until its shards have them.
void Restore(Cluster& cluster, const SessionSpec& spec, const std::vector<std::string>& factors) {
  const absl::Status restored = cluster.client().RestoreSession(spec, 4, factors);
  ASSERT_TRUE(restored.ok()) << restored;
  const auto coordinator = v1::SnapshotService::NewStub(cluster.coordinator().channel());
  ASSERT_TRUE(WaitUntil([&] {
    v1::ListSnapshotsResponse list;
    TimedContext context;
    return coordinator->ListSnapshots(&context, {}, &list).ok() && list.session_snapshots_size() == 1 &&
           list.session_snapshots(0).state() == v1::SNAPSHOT_STATE_COMPLETE;
  }));
}

TEST(CheckpointTest, NoRankBeginsOnAShardThatHasForgottenTheRestoredFactors) {
  Cluster cluster(2, /*on_disk=*/false);
  SessionSpec spec = Spec(ExchangeMode::kDirect, 1);
  const std::vector<std::string> factors = FactorsOfFourSteps(cluster, spec);
  spec.name = "resumed";
  Restore(cluster, spec, factors);
  cluster.Restart(0);
  EXPECT_THAT(cluster.client().Join(spec.name, {.rank = 0, .incarnation = 1, .first_step = 4}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("restored factors are lost")));
  ASSERT_TRUE(cluster.client().CloseSession(spec.name).ok());
  const absl::Status again = cluster.client().RestoreSession(spec, 4, factors);
  EXPECT_TRUE(again.ok()) << again;
  EXPECT_TRUE(cluster.client().Join(spec.name, {.rank = 0, .incarnation = 1, .first_step = 4}).ok());
}

TEST(CheckpointTest, NoRankGoesOnWithoutRestoredFactorsThatNoStepHasUsed) {
  Cluster cluster(2, /*on_disk=*/false);
  SessionSpec spec = Spec(ExchangeMode::kDirect, 1);
  const std::vector<std::string> factors = FactorsOfFourSteps(cluster, spec);
  spec.name = "resumed";
  Restore(cluster, spec, factors);
  std::unique_ptr<Worker> worker = cluster.Join(spec, 0, /*incarnation=*/1, 4);
  cluster.Restart(0);
  EXPECT_THAT(RunStep(*worker, 4), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("restored factors are lost")));
  worker = nullptr;
  ASSERT_TRUE(cluster.client().CloseSession(spec.name).ok());

  Restore(cluster, spec, factors);
  worker = cluster.Join(spec, 0, /*incarnation=*/1, 4);
  RunSteps(*worker, 4, 5);
  cluster.Restart(0);  // from here on the shard is told what it lacks
  RunSteps(*worker, 5, 7);
}

// All ranks read at once, and the shard answers one FETCH of the session at a time.
TEST(CheckpointTest, AJobResumesWithAnotherNumberOfRanks) {
  Cluster cluster(1, /*on_disk=*/false);
  SessionSpec spec = Spec(ExchangeMode::kDirect, 1);
  const std::vector<std::string> factors = FactorsOfFourSteps(cluster, spec);
  spec.name = "resumed";
  spec.world_size = 2;
  const absl::Status restored = cluster.client().RestoreSession(spec, 4, factors);
  ASSERT_TRUE(restored.ok()) << restored;
  std::barrier<> together(2);
  ForEachRank(2, [&](uint32_t rank) {
    const std::unique_ptr<Worker> worker = cluster.Join(spec, rank, /*incarnation=*/1, 4);
    for (int i = 0; i < 10; ++i) EXPECT_EQ(ReadAll(*worker), factors);
    together.arrive_and_wait();
    const std::vector<Step> answers = RunSteps(*worker, 4, 7);
    for (const Answer& answer : answers.back()) EXPECT_EQ(answer.decision, Decision::kPreconditioned);
  });
}

}  // namespace
}  // namespace precondor
