// SPDX-License-Identifier: Apache-2.0
// The client against a whole server in this process, over TCP.
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cpp/tools/ctl_commands.h"
#include "kernels/base/error_reason.h"
#include "kernels/base/mutex.h"
#include "precondor/client.h"
#include "server/app/app.h"
#include "tests/loopback/relay.h"
#include "tests/loopback/service_client.h"
#include "tests/support/normal_floats.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using ::testing::HasSubstr;

// The second layer is above two chunks in f32.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {{5, 7}, {700, 800}, {16, 3}};

class Server {
 public:
  explicit Server(const std::string& advertise = "", const std::string& listen = "127.0.0.1:0",
                  bool shares_memory = true) {
    ServerConfig config;
    if (!shares_memory) config.shared_memory_bytes = 0;
    config.listen = {listen};
    config.advertise = advertise;
    config.threads = 2;
    auto app = App::Start(config, logger_);
    EXPECT_TRUE(app.ok()) << app.status();
    app_ = *std::move(app);
  }
  int port() const { return app_->port(); }
  std::string address() const { return app_->addresses().front(); }
  std::unique_ptr<Client> Connect() const { return ConnectTo(address()); }

 private:
  NullLogger logger_;
  std::unique_ptr<App> app_;
};

SessionSpec Spec(const std::string& method, int32_t world_size, ExchangeMode exchange, DType dtype) {
  SessionSpec spec;
  spec.name = "test";
  spec.seed = 5;
  spec.world_size = world_size;
  spec.exchange = exchange;
  spec.statistics = StatisticsKind::kPerWorkerMean;
  spec.gradient_dtype = dtype;
  spec.inv_freq = 2;
  spec.warmup_steps = 1;
  spec.method.name = method;
  for (const auto& [d_out, d_in] : kShapes) {
    spec.layers.push_back({absl::StrCat("layer", spec.layers.size()), d_out, d_in, false});
  }
  return spec;
}

uint64_t SeedOf(uint64_t step, size_t layer, uint32_t rank) { return step * 1000 + layer * 100 + rank; }

std::vector<float> Gradient(uint64_t step, size_t layer, uint32_t rank) {
  return Normal(kShapes[layer].first * kShapes[layer].second, SeedOf(step, layer, rank));
}

// Results of `steps` steps, [step][layer]; empty where this rank sends no gradient.
using Results = std::vector<std::vector<std::vector<float>>>;

// One rank's part of a training run; gradients are preconditioned in place.
Results RunRank(Worker& worker, uint64_t steps) {
  Results results(steps, std::vector<std::vector<float>>(kShapes.size()));
  for (uint64_t step = 0; step < steps; ++step) {
    std::vector<PreconditionFuture> futures(kShapes.size());
    for (size_t layer = 0; layer < kShapes.size(); ++layer) {
      const auto [d_out, d_in] = kShapes[layer];
      const int64_t index = static_cast<int64_t>(layer);
      // Nothing waits for statistics of a method that needs none: ranks that are apart would find the step retired.
      if (worker.NeedsStatistics(step, index)) {
        const std::vector<float> a = Normal(d_in, SeedOf(step, layer, worker.session().rank) + 50);
        const std::vector<float> g = Normal(d_out, SeedOf(step, layer, worker.session().rank) + 60);
        EXPECT_TRUE(worker
                        .SendStatistics(step, index, ConstMatrixView(a.data(), 1, d_in),
                                        ConstMatrixView(g.data(), 1, d_out), 10 + worker.session().rank)
                        .ok());
      }
      EXPECT_FALSE(worker.SendsGradient(99));
      if (!worker.SendsGradient(index)) continue;
      results[step][layer] = Gradient(step, layer, worker.session().rank);
      const MatrixView view(results[step][layer].data(), d_out, d_in);
      futures[layer] = worker.Precondition(step, index, {view, view}, 10 + worker.session().rank);
    }
    for (size_t layer = 0; layer < kShapes.size(); ++layer) {
      if (!worker.SendsGradient(static_cast<int64_t>(layer))) continue;
      const auto result = futures[layer].Wait();
      EXPECT_TRUE(result.ok()) << result.status();
    }
    const auto directive = worker.ReportStep(step, 1.0, 10, true, 0.1).Wait();
    EXPECT_TRUE(directive.ok()) << directive.status();
  }
  const absl::Status flushed = worker.Flush();
  EXPECT_TRUE(flushed.ok()) << flushed;
  return results;
}

std::vector<Results> RunAll(const Server& server, const SessionSpec& spec, uint64_t steps) {
  const auto client = server.Connect();
  const auto opened = client->OpenSession(spec);
  EXPECT_TRUE(opened.ok()) << opened.status();
  std::vector<Results> results(static_cast<size_t>(spec.world_size));
  ForEachRank(static_cast<uint32_t>(spec.world_size), [&](uint32_t rank) {
    const auto worker = client->Join(spec.name, {rank, 1});
    ASSERT_TRUE(worker.ok()) << worker.status();
    results[rank] = RunRank(**worker, steps);
  });
  EXPECT_TRUE(*client->CloseSession(spec.name));
  return results;
}

struct Case {
  int32_t world_size;
  ExchangeMode exchange;
  DType dtype;
};

class ClientServiceTest : public ::testing::TestWithParam<Case> {};

TEST_P(ClientServiceTest, IdentityAveragesTheGradients) {
  const Case& c = GetParam();
  const Server server;
  const std::vector<Results> results = RunAll(server, Spec("identity", c.world_size, c.exchange, c.dtype), 3);
  // One rounding of every gradient and one of the mean, of values up to about 5.
  const double tolerance = c.dtype == DType::kBF16 ? 0.04 : c.dtype == DType::kF16 ? 0.005 : 1e-5;
  for (uint64_t step = 0; step < 3; ++step) {
    for (size_t layer = 0; layer < kShapes.size(); ++layer) {
      std::vector<double> want(static_cast<size_t>(kShapes[layer].first * kShapes[layer].second));
      double weights = 0;
      for (uint32_t rank = 0; rank < static_cast<uint32_t>(c.world_size); ++rank) {
        if (c.exchange == ExchangeMode::kDelegate && rank != layer % static_cast<size_t>(c.world_size)) continue;
        const std::vector<float> gradient = Gradient(step, layer, rank);
        weights += 10 + rank;
        for (size_t i = 0; i < want.size(); ++i) want[i] += (10.0 + rank) * gradient[i];
      }
      for (const Results& rank_results : results) {
        const std::vector<float>& have = rank_results[step][layer];
        for (size_t i = 0; i < have.size(); ++i) ASSERT_NEAR(have[i], want[i] / weights, tolerance);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ClientServiceTest,
    ::testing::Values(Case{1, ExchangeMode::kDirect, DType::kF32}, Case{1, ExchangeMode::kDirect, DType::kF16},
                      Case{1, ExchangeMode::kDirect, DType::kBF16}, Case{4, ExchangeMode::kDirect, DType::kF32},
                      Case{4, ExchangeMode::kDelegate, DType::kF32}, Case{4, ExchangeMode::kDelegate, DType::kBF16}));

TEST(LayerMethodsTest, EachLayerAnswersByItsOwn) {
  constexpr uint64_t kSteps = 4;
  SessionSpec spec = Spec("mkor", 2, ExchangeMode::kDirect, DType::kF32);
  std::map<std::string, std::vector<Results>> alone;
  for (const std::string method : {"mkor", "identity"}) {
    const Server server;
    spec.method.name = method;
    alone[method] = RunAll(server, spec, kSteps);
  }
  spec.method.name = "mkor";
  spec.layer_methods = {
      {.method = {.name = "identity", .options = {}}, .statistics = StatisticsKind::kMean, .layers = {1}}};
  const Server server;
  const std::vector<Results> mixed = RunAll(server, spec, kSteps);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (uint64_t step = 0; step < kSteps; ++step) {
      for (size_t layer = 0; layer < kShapes.size(); ++layer) {
        EXPECT_EQ(mixed[rank][step][layer], alone[layer == 1 ? "identity" : "mkor"][rank][step][layer])
            << "step " << step << " layer " << layer;
      }
      EXPECT_NE(mixed[rank][step][1], alone["mkor"][rank][step][1]);
    }
  }
}

TEST(ClientServiceFaultTest, CutConnectionsChangeNoBitOfTheResults) {
  const SessionSpec spec = Spec("mkor", 2, ExchangeMode::kDirect, DType::kF32);
  constexpr uint64_t kSteps = 5;
  std::vector<Results> want;
  {
    const Server server;
    want = RunAll(server, spec, kSteps);
  }
  Relay relay;
  const Server server(relay.address(), "127.0.0.1:0", /*shares_memory=*/false);
  relay.Target(server.port());
  relay.CutAfter({3'000'000, 1'000'000, 5'000'000, 777});
  EXPECT_EQ(RunAll(server, spec, kSteps), want);
  EXPECT_EQ(relay.cuts(), 4);
}

TEST(ClientServiceFaultTest, SharedMemoryEndsWithItsConnectionAndChangesNoBit) {
  const SessionSpec spec = Spec("mkor", 2, ExchangeMode::kDirect, DType::kF32);
  constexpr uint64_t kSteps = 20;
  const std::vector<Results> want = RunAll(Server("", "127.0.0.1:0", /*shares_memory=*/false), spec, kSteps);
  Relay relay;
  const Server server(relay.address());
  relay.Target(server.port());
  Mutex mu;
  CondVar changed;
  bool ended = false;
  std::thread cutter([&] {
    MutexLock lock(mu);
    auto pause = std::chrono::milliseconds(30);
    for (; !changed.wait_for(mu, pause, [&] { return ended; }); pause += pause / 4) relay.Cut();  // lets a slow one end
  });
  EXPECT_EQ(RunAll(server, spec, kSteps), want);
  EXPECT_GT(relay.cuts(), 0);
  {
    MutexLock lock(mu);
    ended = true;
  }
  changed.notify_all();
  cutter.join();
}

// The folder's name is one that a URI writes in another way.
TEST(ClientServiceUnixTest, ASocketsResultsAreBitwiseThoseOfAPort) {
  const SessionSpec spec = Spec("mkor", 2, ExchangeMode::kDirect, DType::kF32);
  const TempDir folder;
  const std::string odd = folder.path() + "/a b%#?";
  ASSERT_TRUE(std::filesystem::create_directory(odd));
  const std::vector<Results> want = RunAll(Server(), spec, 5);
  EXPECT_EQ(RunAll(Server("", absl::StrCat("unix:", odd, "/s")), spec, 5), want);
  EXPECT_EQ(RunAll(Server("", absl::StrCat("unix:", odd, "/t"), /*shares_memory=*/false), spec, 5), want);
}

TEST(ClientServiceUnixTest, AClientFindsTheNextServerOfThePath) {
  const TempDir folder;
  const std::string address = absl::StrCat("unix:", folder.path(), "/s");
  auto server = std::make_unique<Server>("", address);
  const auto client = server->Connect();
  ASSERT_TRUE(client->OpenSession(Spec("mkor", 1, ExchangeMode::kDirect, DType::kF32)).ok());
  server.reset();
  server = std::make_unique<Server>("", address);
  const auto opened = client->OpenSession(Spec("mkor", 1, ExchangeMode::kDirect, DType::kF32));
  EXPECT_TRUE(opened.ok() && opened->created) << opened.status();
}

TEST(ClientServiceUnixTest, AnAddressThatNoSocketCanHaveIsToldAtOnce) {
  EXPECT_THAT(Client::Connect({.coordinator = absl::StrCat("unix:/", std::string(107, 'a'))}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("1 ... 107 bytes, got 108")));
}

TEST(ClientServiceFaultTest, ASessionThatAnotherProcessHasReplacedCanBeJoined) {
  const Server server;
  const auto first = server.Connect(), second = server.Connect();
  const SessionSpec spec = Spec("identity", 1, ExchangeMode::kDirect, DType::kF32);
  ASSERT_TRUE(first->OpenSession(spec).ok());
  ASSERT_TRUE(second->CloseSession("test").ok());
  ASSERT_TRUE(second->OpenSession(spec).ok());
  EXPECT_EQ(first->CloseSession("test").status().code(), absl::StatusCode::kPermissionDenied)
      << "it is not the session that this client means";
  const auto worker = first->Join("test", {});
  ASSERT_TRUE(worker.ok()) << worker.status();
  EXPECT_EQ(RunRank(**worker, 1)[0].size(), kShapes.size());
}

TEST(ClientServiceFaultTest, AServerThatEndsFailsWhatIsOutstandingAtItsDeadline) {
  auto server = std::make_unique<Server>();
  ClientOptions options;
  options.coordinator = server->address();
  options.result_timeout = absl::Seconds(3);
  options.rpc_timeout = absl::Seconds(3);
  const auto client = Client::Connect(options);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE((*client)->OpenSession(Spec("identity", 1, ExchangeMode::kDirect, DType::kF32)).ok());
  const auto worker = (*client)->Join("test", {0, 1});
  ASSERT_TRUE(worker.ok()) << worker.status();
  server.reset();
  std::vector<float> gradient = Gradient(0, 1, 0);
  const MatrixView view(gradient.data(), kShapes[1].first, kShapes[1].second);
  EXPECT_THAT(
      (*worker)->Precondition(0, 1, {view, view}, 1).Wait(),
      StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("which the shard announces (--advertise), ended: ")));
  // The report waits for a coordinator; the lease does not end with it.
  EXPECT_TRUE((*worker)->ReportStep(0, 1, 1, true, 0.1).Wait().ok());
}

TEST(CtlCommandsTest, AskARunningServer) {
  const Server server;
  const auto client = server.Connect();
  ASSERT_TRUE(client->OpenSession(Spec("mkor", 1, ExchangeMode::kDirect, DType::kF32)).ok());
  const auto worker = client->Join("test", {0, 1});
  ASSERT_TRUE(worker.ok());
  RunRank(**worker, 2);
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.push_back("--server=" + server.address());
    const auto options = ParseCtlOptions(arguments);
    EXPECT_TRUE(options.ok()) << options.status();
    const auto output = RunCtlCommand(*options);
    EXPECT_TRUE(output.ok()) << output.status();
    EXPECT_TRUE(output->ok);
    return output->text;
  };
  EXPECT_THAT(run({"status"}), HasSubstr(server.address()));
  EXPECT_THAT(run({"sessions"}), HasSubstr("test"));
  EXPECT_THAT(run({"layers", "test"}), HasSubstr("layer1"));
  EXPECT_THAT(run({"layers", "test", "--json"}), HasSubstr("\"preconditioned\": 2"));
  EXPECT_THAT(run({"mode", "test"}), HasSubstr("by policy"));
  EXPECT_THAT(run({"mode", "test", "first-order"}), HasSubstr("by an operator"));
  EXPECT_THAT(run({"mode", "test", "--json"}), HasSubstr("\"forced\": \"first_order\""));
  EXPECT_THAT(run({"mode", "test", "auto"}), HasSubstr("by policy"));
  EXPECT_EQ(run({"health"}), "SERVING\n");
  const auto refusal = [&](std::vector<std::string> arguments) {
    arguments.push_back("--server=" + server.address());
    return RunCtlCommand(*ParseCtlOptions(arguments)).status();
  };
  EXPECT_EQ(refusal({"snapshot", "verify", "nothing"}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(refusal({"snapshot", "list", "nothing"}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(run({"session", "close", "test"}), "test: closed\n");
  EXPECT_EQ(refusal({"session", "close", "test"}).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(run({"drain", "--deadline=100ms"}), HasSubstr("in flight"));
}

TEST(CtlCommandsTest, HealthSaysWhyNoServerAnswers) {
  const auto options = ParseCtlOptions({"health", "--server=127.0.0.1:1", "--timeout=100ms"});
  ASSERT_TRUE(options.ok());
  EXPECT_THAT(RunCtlCommand(*options), MessageIs(AllOf(HasSubstr("no answer within 100ms"), HasSubstr("onnect"))));
}

}  // namespace
}  // namespace precondor
