// SPDX-License-Identifier: Apache-2.0
// Health, drain and the end of a server, in this process and as one of its own.
#include <arpa/inet.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "gmock/gmock.h"

#include "precondor/v1/shard.grpc.pb.h"
#include "tests/loopback/generic_call.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

extern char** environ;

namespace precondor {
namespace {

TEST(ServerLifecycleTest, DrainTurnsReadinessAndNotLivenessAndRefusesSessions) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job", 2);
  EXPECT_EQ(CheckHealth(server.channel(), ""), 1);
  EXPECT_EQ(CheckHealth(server.channel(), "liveness"), 1);
  EXPECT_EQ(CheckHealth(server.channel(), "unknown"), -1);
  server.app().RequestDrain(absl::Seconds(30));
  EXPECT_EQ(CheckHealth(server.channel(), ""), 2);
  EXPECT_EQ(CheckHealth(server.channel(), "liveness"), 1);
  const grpc::Status status = server.Open(RawServer::Spec("late"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_DRAINING);
  EXPECT_TRUE(server.Info().draining());
  EXPECT_EQ(server.Info().role(), v1::ROLE_ALL);
}

TEST(ServerLifecycleTest, ListensOnASocketAndAPortAndWorkersDialTheFirst) {
  const TempDir folder;
  ServerConfig config;
  config.listen = {absl::StrCat("unix:", folder.path(), "/s"), "127.0.0.1:0"};
  RawServer server(config);
  const std::string port = server.address();
  EXPECT_THAT(server.app().addresses(), ::testing::ElementsAre(config.listen.front(), port));
  EXPECT_EQ(CheckHealth(server.channel(), ""), 1);
  EXPECT_EQ(CheckHealth(grpc::CreateChannel(port, grpc::InsecureChannelCredentials()), ""), 1);
  EXPECT_EQ(server.OpenAndJoin("job").shard_map().assignments(0).address(), config.listen.front());
}

// The directory names the shard of role `all` by no address.
TEST(ServerLifecycleTest, ConnectedClientsOutliveTheFileOfTheirSocket) {
  const TempDir folder;
  const std::string path = folder.path() + "/s";
  ServerConfig config;
  config.listen = {"unix:" + path};
  RawServer server(config);
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  ASSERT_TRUE(std::filesystem::remove(path));
  v1::ExchangeResponse response;
  const grpc::Status status = server.Precondition(RawRequest(job, 0, 0), &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  grpc::ChannelArguments own_connection;
  own_connection.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  EXPECT_EQ(
      CheckHealth(grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), own_connection), ""),
      -1);
}

TEST(ServerLifecycleTest, AServerOfAllRolesFindsItsSessionsAgainAtAnotherAddress) {
  const TempDir data;
  ServerConfig config;
  config.data_dir = data.path();
  std::string fixed;
  {
    RawServer first(config);
    first.OpenAndJoin("job");
    fixed = absl::StrCat("localhost:", first.app().port());
  }
  for (const std::string& listen : {fixed, std::string("127.0.0.1:0")}) {
    config.listen = {listen};
    RawServer server(config);
    v1::JoinSessionResponse joined;
    const grpc::Status status = server.Join("job", 0, kRawIncarnation, &joined);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_EQ(joined.shard_map().assignments_size(), 1);
    EXPECT_EQ(joined.shard_map().assignments(0).address(), server.app().addresses().front());
    v1::ExchangeResponse response;
    EXPECT_TRUE(server.Precondition(RawRequest(joined, 0, 0), &response).ok());
  }
}

// A gradient that waits for another rank must not keep the server from ending.
TEST(ServerLifecycleTest, AWaitingGradientDoesNotKeepTheServerUp) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job", 2);
  grpc::Status status;
  std::thread waiting([&] {
    v1::ExchangeResponse response;
    status = server.Precondition(RawRequest(job, 0, 0), &response);
  });
  EXPECT_TRUE(WaitUntil([&] { return server.Stats("job")[0].accepted() == 2; }));
  server.app().RequestDrain(absl::Milliseconds(1));
  server.app().Wait().IgnoreError();  // what is lost does not matter here
  server.owned_app().reset();
  waiting.join();
  EXPECT_FALSE(status.ok());
}

// A shard that takes calls and answers none of them before Release.
class SilentShard final : public v1::ShardService::Service {
 public:
  SilentShard() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  int probes() const { return probes_; }  // what the coordinator asks by itself, again and again
  int calls() const { return calls_; }    // the others
  void Release() { release_.set_value(); }

 private:
  grpc::Status DescribeShard(grpc::ServerContext* context, const v1::DescribeShardRequest*,
                             v1::DescribeShardResponse*) override {
    // A probe has a short deadline, other calls that of shard_timeout_ms.
    ++(context->deadline() - std::chrono::system_clock::now() < std::chrono::minutes(1) ? probes_ : calls_);
    released_.wait_for(std::chrono::minutes(2));
    return {grpc::StatusCode::FAILED_PRECONDITION, "released"};
  }

  std::atomic<int> probes_ = 0;
  std::atomic<int> calls_ = 0;
  std::promise<void> release_;
  std::shared_future<void> released_ = release_.get_future().share();
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// Calls that wait for a shard hold up neither those that do not, nor the end of the server once their clients are gone.
TEST(ServerLifecycleTest, SilentShardHoldsUpOnlyThoseWhoNeedIt) {
  constexpr int kThreads = 32;  // of the server's for calls that may wait
  SilentShard shard;
  ServerConfig config;
  config.role = ServerRole::kCoordinator;
  config.shards = {shard.address()};
  config.shard_timeout_ms = 3600 * 1000;
  RawServer server(config);
  EXPECT_TRUE(WaitUntil([&] { return shard.probes() > 0; }));
  std::atomic<int> ended = 0;
  std::vector<std::thread> openers;
  const auto open = [&](int i) {
    openers.emplace_back([&server, &ended, i] {
      EXPECT_FALSE(server.Open(RawServer::Spec(absl::StrCat("job", i))).ok());
      ++ended;
    });
  };
  for (int i = 0; i < kThreads; ++i) open(i);
  EXPECT_TRUE(WaitUntil([&] { return shard.calls() == kThreads; }));
  for (int i = 0; i < kThreads; ++i) open(kThreads + i);
  server.Info();
  EXPECT_EQ(ended, 0);
  server.app().RequestDrain(absl::Milliseconds(1));
  std::thread waiting([&] { server.app().Wait().IgnoreError(); });
  EXPECT_TRUE(WaitUntil([&] { return ended == 2 * kThreads; }));
  shard.Release();
  waiting.join();
  for (std::thread& opener : openers) opener.join();
  EXPECT_EQ(shard.calls(), kThreads);
}

TEST(ServerLifecycleTest, MetricsTellRefusals) {
  RawServer server;
  const v1::JoinSessionResponse job = server.OpenAndJoin("job");
  RawStep request = RawRequest(job, 0, 0);
  request.gradient.set_epoch(0);
  request.statistics.Clear();
  v1::ExchangeResponse response;
  EXPECT_FALSE(server.Precondition(request, &response).ok());
  EXPECT_EQ(server.Stats("job")[0].rejected(), 1u);
  EXPECT_THAT(server.app().metrics_text(),
              ::testing::ContainsRegex("precondor_rejected_total\\{[^}]*reason=\"stale_epoch\"[^}]*\\} 1"));
}

// precondor-server as a process of its own; killed if the test leaves it running.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments, const posix_spawn_file_actions_t* actions = nullptr) {
    arguments.insert(arguments.begin(), PRECONDOR_SERVER);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, PRECONDOR_SERVER, actions, nullptr, argv.data(), environ), 0);
  }
  ~Process() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void Signal(int signal) const { kill(pid_, signal); }
  pid_t pid() const { return pid_; }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  bool running() const { return waitpid(pid_, nullptr, WNOHANG) == 0; }

 private:
  pid_t pid_ = -1;
};

TEST(ServerProcessTest, ServesAgainAfterItsDescriptorsWereUsedUp) {
#ifdef PRECONDOR_SANITIZED
  GTEST_SKIP() << "UBSan needs descriptors of its own";
#endif
  const TempDir folder;
  const std::string port_file = folder.path() + "/port";
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  rlimit low = limit;
  low.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  Process process({"--listen=127.0.0.1:0", "--port-file=" + port_file});
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !process.running(); }));
  int port = 0;
  std::ifstream(port_file) >> port;
  const auto descriptors = [&process] {
    const std::filesystem::directory_iterator all(absl::StrCat("/proc/", process.pid(), "/fd"));
    return std::distance(begin(all), end(all));
  };
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> sockets;
  for (int i = 0; i < 120; ++i) {
    sockets.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(sockets.back(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  EXPECT_TRUE(WaitUntil([&] { return descriptors() >= 100; })) << descriptors();
  for (const int socket : sockets) close(socket);
  const auto channel = grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  const auto admin = v1::AdminService::NewStub(channel);
  v1::GetServerInfoResponse info;
  TimedContext context;
  context.set_wait_for_ready(true);
  const grpc::Status status = admin->GetServerInfo(&context, {}, &info);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(ServerProcessTest, EndsWithZeroOnSigtermWhileAStreamIsOpen) {
  const std::filesystem::path port_file = std::filesystem::path(::testing::TempDir()) / absl::StrCat("port", getpid());
  std::filesystem::remove(port_file);
  Process process({"--listen=127.0.0.1:0", "--port-file=" + port_file.string(), "--drain-deadline-ms=100"});
  ASSERT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !process.running(); }));
  ASSERT_TRUE(std::filesystem::exists(port_file));
  int port = 0;
  std::ifstream(port_file) >> port;
  const auto channel = grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  const auto stub = v1::PreconditionService::NewStub(channel);
  TimedContext context;
  auto stream = stub->Exchange(&context);
  v1::ExchangeResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_FALSE(stream->Read(&answer));
  EXPECT_FALSE(stream->Finish().ok());
  std::filesystem::remove(port_file);
}

TEST(ServerProcessTest, AnIdleServerTakesHardlyAnyTime) {
  const TempDir folder;
  const std::string port_file = folder.path() + "/port";
  Process process({"--listen=127.0.0.1:0", "--port-file=" + port_file});
  ASSERT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !process.running(); }));
  int port = 0;
  std::ifstream(port_file) >> port;
  const auto channel = grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
  const auto stub = v1::PreconditionService::NewStub(channel);
  TimedContext context;
  const auto stream = stub->Exchange(&context);
  v1::ExchangeResponse answer;
  ASSERT_TRUE(stream->Read(&answer));
  clockid_t clock = {};  // of the server's threads on a processor
  ASSERT_EQ(clock_getcpuclockid(process.pid(), &clock), 0);
  const auto nanoseconds = [clock] {
    timespec time = {};
    clock_gettime(clock, &time);
    return int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
  };
  // Once it has begun, two seconds cost less than 1 % of a processor.
  constexpr auto kWindow = std::chrono::seconds(2);
  int64_t before = nanoseconds();
  auto end = std::chrono::steady_clock::now() + kWindow;
  EXPECT_TRUE(WaitUntil([&] {
    if (std::chrono::steady_clock::now() < end) return false;
    const int64_t now = nanoseconds();
    end += kWindow;
    return now - std::exchange(before, now) < 20'000'000;
  }));
  context.TryCancel();
}

TEST(ServerProcessTest, ItsSocketGoesWithItAndOutlivesAKill) {
  const TempDir folder;
  const std::string socket = folder.path() + "/s", port_file = folder.path() + "/port";
  const std::vector<std::string> arguments = {"--listen=unix:" + socket, "--port-file=" + port_file,
                                              "--drain-deadline-ms=100"};
  const auto serves = [&](Process& process) {
    EXPECT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !process.running(); }));
    std::string address;
    std::getline(std::ifstream(port_file), address);
    std::filesystem::remove(port_file);
    EXPECT_EQ(address, "unix:" + socket);
    EXPECT_EQ(CheckHealth(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()), ""), 1);
  };
  {
    Process killed(arguments);
    serves(killed);
    EXPECT_EQ(Process(arguments).Wait(), 1) << "the path is taken";
    killed.Signal(SIGKILL);
    EXPECT_EQ(killed.Wait(), -SIGKILL);
  }
  EXPECT_TRUE(std::filesystem::exists(socket));
  Process next(arguments);
  serves(next);
  next.Signal(SIGTERM);
  EXPECT_EQ(next.Wait(), 0);
  EXPECT_FALSE(std::filesystem::exists(socket));
}

TEST(ServerProcessTest, DrainsWithoutStandardDescriptors) {
  const TempDir folder;
  const std::string port_file = folder.path() + "/port";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const int descriptor : {0, 1, 2}) posix_spawn_file_actions_addclose(&actions, descriptor);
  Process process({"--listen=127.0.0.1:0", "--port-file=" + port_file}, &actions);
  posix_spawn_file_actions_destroy(&actions);
  ASSERT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !process.running(); }));
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Wait(), 0);
}

TEST(ServerProcessTest, WaitsForNoReaderOfItsLog) {
  const TempDir folder;
  const std::string port_file = folder.path() + "/port";
  // gRPC then writes lines by the thousand.
  setenv("GRPC_VERBOSITY", "DEBUG", 1);
  setenv("GRPC_TRACE", "http,tcp", 1);
  for (const bool reader_ended : {false, true}) {
    int pipe[2];
    ASSERT_EQ(pipe2(pipe, O_CLOEXEC), 0);
    fcntl(pipe[1], F_SETPIPE_SZ, 4096);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipe[1], STDERR_FILENO);
    if (reader_ended) close(pipe[0]);
    Process process({"--listen=127.0.0.1:0", "--port-file=" + port_file}, &actions);
    posix_spawn_file_actions_destroy(&actions);
    close(pipe[1]);
    EXPECT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !process.running(); }));
    int port = 0;
    std::ifstream(port_file) >> port;
    std::filesystem::remove(port_file);
    for (int call = 0; call < 20; ++call) {
      EXPECT_EQ(
          CheckHealth(grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()), ""),
          1);
    }
    process.Signal(SIGHUP);  // as a terminal that ends
    EXPECT_EQ(process.Wait(), 0);
    if (!reader_ended) close(pipe[0]);
  }
  unsetenv("GRPC_VERBOSITY");
  unsetenv("GRPC_TRACE");
}

TEST(ServerProcessTest, EndsWithTheProcessThatItIsToldOf) {
  const TempDir folder;
  const std::string port_file = folder.path() + "/port";
  Process other({"--listen=127.0.0.1:0"});
  const std::string with_other = absl::StrCat("--exit-with-pid=", other.pid());
  Process server({"--listen=127.0.0.1:0", "--port-file=" + port_file, with_other});
  EXPECT_TRUE(WaitUntil([&] { return std::filesystem::exists(port_file) || !server.running(); }));
  EXPECT_TRUE(server.running());
  other.Signal(SIGKILL);
  EXPECT_EQ(other.Wait(), -SIGKILL);
  EXPECT_EQ(server.Wait(), 0);
  EXPECT_EQ(Process({"--listen=127.0.0.1:0", with_other}).Wait(), 1) << "there is no such process any more";
}

TEST(ServerProcessTest, EndsWithTwoOnABadFlagAndZeroOnAGoodConfiguration) {
  EXPECT_EQ(Process({"--listn=127.0.0.1:0"}).Wait(), 2);
  EXPECT_EQ(Process({"--role=coordinator", "--check-config"}).Wait(), 2);
  EXPECT_EQ(Process({"--check-config"}).Wait(), 0);
}

TEST(ServerProcessTest, EndsWithAnErrorWhereItsThreadsHaveNoRoom) {
#ifdef PRECONDOR_SANITIZED
  GTEST_SKIP() << "a sanitizer needs address space of its own";
#endif
  const TempDir folder;
  const std::string command =
      absl::StrCat("ulimit -v 600000 && exec " PRECONDOR_SERVER " --listen=127.0.0.1:0 2>", folder.path(), "/log");
  const int status = std::system(command.c_str());
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1) << status;
  std::ifstream file(folder.path() + "/log");
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}),
              ::testing::ContainsRegex("address space .ulimit -v.: expected at least [0-9]+ KiB, got 600000"));
}

}  // namespace
}  // namespace precondor
