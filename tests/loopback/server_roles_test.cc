// SPDX-License-Identifier: Apache-2.0
// A coordinator and its shards, each as a server of its own: what goes wrong between them, and their ends.
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"

#include "precondor/v1/shard.grpc.pb.h"
#include "precondor/v1/snapshot.grpc.pb.h"
#include "tests/loopback/generic_call.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/relay.h"
#include "tests/support/temp_dir.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string AddressOf(RawServer& server) { return server.app().addresses().front(); }

std::unique_ptr<RawServer> StartShard(int64_t memory_limit_bytes = int64_t{1} << 30,
                                      const std::string& listen = "127.0.0.1:0") {
  ServerConfig config;
  config.listen = {listen};
  config.role = ServerRole::kShard;
  config.memory_limit_bytes = memory_limit_bytes;
  return std::make_unique<RawServer>(config);
}

std::unique_ptr<RawServer> StartCoordinator(std::vector<std::string> shards, int64_t shard_timeout_ms = 60000) {
  ServerConfig config;
  config.role = ServerRole::kCoordinator;
  config.shards = std::move(shards);
  config.shard_timeout_ms = shard_timeout_ms;
  return std::make_unique<RawServer>(config);
}

void ExpectEmpty(RawServer& shard) {
  EXPECT_EQ(shard.Info().reserved_bytes(), 0u);
  EXPECT_EQ(shard.Info().sessions(), 0u);
}

// Describes itself like any other, and refuses every installation.
class RefusingShard final : public v1::ShardService::Service {
 public:
  explicit RefusingShard(grpc::StatusCode code) : code_(code) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  grpc::Status DescribeShard(grpc::ServerContext*, const v1::DescribeShardRequest*,
                             v1::DescribeShardResponse* response) override {
    response->set_capacity_bytes(uint64_t{1} << 30);
    return grpc::Status::OK;
  }
  grpc::Status InstallSession(grpc::ServerContext*, const v1::InstallSessionRequest*,
                              v1::InstallSessionResponse*) override {
    return {code_, "the device has gone"};
  }
  grpc::Status RemoveSession(grpc::ServerContext*, const v1::RemoveSessionRequest*,
                             v1::RemoveSessionResponse*) override {
    return grpc::Status::OK;
  }

  const grpc::StatusCode code_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class ServerRolesTest : public ::testing::Test {
 protected:
  void Start() {
    for (int s = 0; s < 2; ++s) shards_.push_back(StartShard());
    coordinator_ = StartCoordinator({AddressOf(*shards_[0]), AddressOf(*shards_[1])});
  }
  // The place of the shard that owns `layer`.
  size_t OwnerOf(const v1::JoinSessionResponse& job, uint32_t layer) {
    for (const v1::ShardAssignment& assignment : job.shard_map().assignments()) {
      for (const uint32_t owned : assignment.layers()) {
        if (owned != layer) continue;
        for (size_t s = 0; s < shards_.size(); ++s) {
          if (assignment.address() == AddressOf(*shards_[s])) return s;
        }
      }
    }
    ADD_FAILURE() << "no shard owns layer " << layer;
    return 0;
  }

  std::vector<std::unique_ptr<RawServer>> shards_;
  std::unique_ptr<RawServer> coordinator_;
};

TEST_F(ServerRolesTest, ASessionLivesOnBothShardsAndLeavesNothingBehind) {
  Start();
  const v1::JoinSessionResponse job = coordinator_->OpenAndJoin("job");
  ASSERT_EQ(job.shard_map().assignments_size(), 2);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    RawServer& owner = *shards_[OwnerOf(job, layer)];
    EXPECT_GT(owner.Info().reserved_bytes(), 0u);
    EXPECT_THAT(owner.app().metrics_text(), AllOf(HasSubstr("precondor_updates_total{train_job=\"job\"} 0"),
                                                  Not(HasSubstr("precondor_training_loss{"))));
    v1::ExchangeResponse response;
    const grpc::Status status = owner.Precondition(RawRequest(job, 0, static_cast<int>(layer)), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.outcome().decision(), v1::DECISION_PRECONDITIONED);
  }
  EXPECT_THAT(coordinator_->app().metrics_text(), AllOf(HasSubstr("precondor_expected_workers{train_job=\"job\"} 1"),
                                                        Not(HasSubstr("precondor_updates_total{"))));
  v1::CloseSessionRequest request;
  request.set_name("job");
  v1::CloseSessionResponse response;
  TimedContext context;
  ASSERT_TRUE(coordinator_->sessions->CloseSession(&context, request, &response).ok());
  for (const auto& shard : shards_) {
    ExpectEmpty(*shard);
    EXPECT_THAT(shard->app().metrics_text(), Not(HasSubstr("train_job=")));
  }
  EXPECT_THAT(coordinator_->app().metrics_text(), Not(HasSubstr("train_job=")));
}

TEST_F(ServerRolesTest, ShardsMayBeOnSockets) {
  const TempDir folder;
  for (const char* name : {"/a", "/b"}) {
    shards_.push_back(StartShard(int64_t{1} << 30, absl::StrCat("unix:", folder.path(), name)));
  }
  coordinator_ = StartCoordinator({AddressOf(*shards_[0]), AddressOf(*shards_[1])});
  const v1::JoinSessionResponse job = coordinator_->OpenAndJoin("job");
  EXPECT_NE(OwnerOf(job, 0), OwnerOf(job, 1)) << "each under its path";
}

TEST_F(ServerRolesTest, AShardThatFailsAtTheInstallationFreesTheOther) {
  using grpc::StatusCode;
  // A shard that ends cancels its calls.
  const std::map<StatusCode, StatusCode> told = {{StatusCode::UNAVAILABLE, StatusCode::UNAVAILABLE},
                                                 {StatusCode::CANCELLED, StatusCode::UNAVAILABLE},
                                                 {StatusCode::RESOURCE_EXHAUSTED, StatusCode::RESOURCE_EXHAUSTED}};
  for (const auto& [code, expected] : told) {
    const std::unique_ptr<RawServer> live = StartShard();
    const RefusingShard refusing(code);
    const auto coordinator = StartCoordinator({AddressOf(*live), refusing.address()});
    const grpc::Status status = coordinator->Open(RawServer::Spec("job"));
    EXPECT_EQ(status.error_code(), expected);
    EXPECT_THAT(status.error_message(), AllOf(HasSubstr(refusing.address()), HasSubstr("the device has gone")));
    // It did come to an installation there, which was taken back.
    EXPECT_THAT(live->app().metrics_text(),
                HasSubstr("precondor_rpcs_total{code=\"ok\",method=\"ShardService/InstallSession\"} 1"));
    ExpectEmpty(*live);
    EXPECT_THAT(live->app().metrics_text(), Not(HasSubstr("train_job=")));
    EXPECT_EQ(coordinator->Info().sessions(), 0u);
  }
}

TEST_F(ServerRolesTest, TooLargeASessionIsRefusedWithTheNumbers) {
  constexpr int64_t kMiB = 1 << 20;
  shards_.push_back(StartShard(kMiB));
  shards_.push_back(StartShard(2 * kMiB));
  coordinator_ = StartCoordinator({AddressOf(*shards_[0]), AddressOf(*shards_[1])});
  v1::SessionSpec spec = RawServer::Spec("job");
  spec.mutable_layers(0)->set_d_out(1024);
  spec.mutable_layers(0)->set_d_in(1024);  // 4 MiB of gradient alone
  const grpc::Status status = coordinator_->Open(spec);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_CAPACITY);
  EXPECT_THAT(status.error_message(), AllOf(HasSubstr("session \"job\""), HasSubstr("2097152")));
  for (const auto& shard : shards_) ExpectEmpty(*shard);
  EXPECT_TRUE(coordinator_->Open(RawServer::Spec("job")).ok()) << "the name is free for what does fit";
}

TEST_F(ServerRolesTest, EachRoleServesItsOwnServicesAlone) {
  Start();
  const auto services = [](RawServer& server) {
    const std::string list_all = "\x3a\x01*";  // ServerReflectionRequest.list_services = "*"
    return GenericCall(server.channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", list_all)
        .Read()
        .value_or("no answer");
  };
  EXPECT_THAT(services(*shards_[0]),
              AllOf(HasSubstr("precondor.v1.PreconditionService"), HasSubstr("precondor.v1.ShardService"),
                    HasSubstr("precondor.v1.AdminService"), HasSubstr("grpc.health.v1.Health"),
                    Not(HasSubstr("precondor.v1.SessionService"))));
  EXPECT_THAT(services(*coordinator_),
              AllOf(HasSubstr("precondor.v1.SessionService"), HasSubstr("precondor.v1.AdminService"),
                    HasSubstr("grpc.health.v1.Health"), Not(HasSubstr("precondor.v1.PreconditionService")),
                    Not(HasSubstr("precondor.v1.ShardService"))));
  RawServer all;
  EXPECT_THAT(services(all),
              AllOf(HasSubstr("precondor.v1.PreconditionService"), HasSubstr("precondor.v1.SessionService"),
                    Not(HasSubstr("precondor.v1.ShardService"))))
      << "its coordinator calls its shard in the process";
  EXPECT_EQ(coordinator_->Open(RawServer::Spec("job")).error_code(), grpc::StatusCode::OK);
  EXPECT_EQ(shards_[0]->Open(RawServer::Spec("job")).error_code(), grpc::StatusCode::UNIMPLEMENTED);
  v1::CreateSnapshotRequest request;
  request.set_session("job");
  v1::CreateSnapshotResponse response;
  TimedContext context;
  const grpc::Status refused =
      v1::SnapshotService::NewStub(shards_[0]->channel())->CreateSnapshot(&context, request, &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(refused.error_message(), "snapshot create: expected a coordinator, got a shard");
}

TEST_F(ServerRolesTest, WatchersSeeTheDrain) {
  Start();
  for (RawServer* server : {coordinator_.get(), shards_[0].get()}) {
    GenericCall readiness(server->channel(), "/grpc.health.v1.Health/Watch", HealthRequest(""));
    EXPECT_EQ(HealthStatus(readiness.Read()), 1);
    server->app().RequestDrain(absl::Minutes(1));
    EXPECT_EQ(HealthStatus(readiness.Read()), 2);
    EXPECT_EQ(CheckHealth(server->channel(), ""), 2);
    EXPECT_EQ(CheckHealth(server->channel(), "liveness"), 1);
    EXPECT_TRUE(server->Info().draining());
  }
  EXPECT_EQ(CheckHealth(shards_[1]->channel(), ""), 1) << "no call drained it";
}

// As one that was paused, and replaced meanwhile.
TEST_F(ServerRolesTest, AShardThatHangsHoldsUpNoJobOfOthers) {
  constexpr int kRanks = 48;  // more than the coordinator has threads for calls
  std::vector<Relay> relays(2);
  std::vector<std::string> addresses;
  for (Relay& relay : relays) {
    shards_.push_back(StartShard());
    relay.Target(shards_.back()->app().port());
    addresses.push_back(relay.address());
  }
  coordinator_ = StartCoordinator(addresses);
  ASSERT_TRUE(coordinator_->Open(RawServer::Spec("both", kRanks)).ok());
  v1::SessionSpec spec = RawServer::Spec("one");
  spec.mutable_layers()->RemoveLast();
  ASSERT_TRUE(coordinator_->Open(spec).ok());
  v1::JoinSessionResponse job;
  ASSERT_TRUE(coordinator_->Join("one", 0, 1, &job).ok());
  ASSERT_EQ(job.shard_map().assignments_size(), 1);
  Relay& hung = relays[job.shard_map().assignments(0).address() == addresses[0] ? 1 : 0];
  hung.Hold(true);
  std::atomic<int> joined = 0;
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      v1::JoinSessionResponse ignored;
      if (coordinator_->Join("both", rank, 1, &ignored).ok()) ++joined;
    });
  }
  EXPECT_TRUE(hung.WaitUntilHeld());
  EXPECT_TRUE(coordinator_->Join("one", 0, 2, &job).ok());
  EXPECT_EQ(joined, 0);
  hung.Hold(false);
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(joined, kRanks);
}

TEST_F(ServerRolesTest, ACoordinatorThatIsReplacedStopsAndIsNotReady) {
  Start();
  EXPECT_EQ(CheckHealth(coordinator_->channel(), ""), 1);
  const auto later = StartCoordinator({AddressOf(*shards_[0]), AddressOf(*shards_[1])});
  ASSERT_TRUE(later->Open(RawServer::Spec("later")).ok());
  EXPECT_TRUE(WaitUntil([this] { return CheckHealth(coordinator_->channel(), "") == 2; }));
  EXPECT_EQ(CheckHealth(coordinator_->channel(), "liveness"), 1);
  const grpc::Status refused = coordinator_->Open(RawServer::Spec("late"));
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.error_message(), HasSubstr("another coordinator has taken over"));
  for (const auto& shard : shards_) EXPECT_EQ(shard->Info().sessions(), 1u) << "the later one's stays";
  EXPECT_EQ(CheckHealth(later->channel(), ""), 1);
}

TEST_F(ServerRolesTest, AShardLetsNoCallInWithoutAToken) {
  Start();
  const auto stub = v1::ShardService::NewStub(shards_[0]->channel());
  TimedContext context;
  v1::RemoveSessionRequest request;
  request.set_session_id(1);
  v1::RemoveSessionResponse response;
  const grpc::Status refused = stub->RemoveSession(&context, request, &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("fencing_token"));
}

TEST_F(ServerRolesTest, ADrainedCoordinatorLeavesTheShardsAtWork) {
  Start();
  const v1::JoinSessionResponse job = coordinator_->OpenAndJoin("job");
  coordinator_->app().RequestDrain(absl::Minutes(1));
  const grpc::Status status = coordinator_->Open(RawServer::Spec("late"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_DRAINING);
  coordinator_->app().Wait().IgnoreError();  // a coordinator has no factors
  coordinator_->owned_app().reset();
  v1::ExchangeResponse response;
  const grpc::Status answered = shards_[OwnerOf(job, 0)]->Precondition(RawRequest(job, 0, 0), &response);
  EXPECT_TRUE(answered.ok()) << answered.error_message();
}

TEST_F(ServerRolesTest, ADrainingShardFinishesItsSessionsAndTakesNoNewOnes) {
  Start();
  const v1::JoinSessionResponse job = coordinator_->OpenAndJoin("job");
  const size_t drained = OwnerOf(job, 0);
  const uint64_t reserved = shards_[1 - drained]->Info().reserved_bytes();
  shards_[drained]->app().RequestDrain(absl::Minutes(1));
  v1::ExchangeResponse response;
  const grpc::Status answered = shards_[drained]->Precondition(RawRequest(job, 0, 0), &response);
  EXPECT_TRUE(answered.ok()) << answered.error_message();
  const grpc::Status status = coordinator_->Open(RawServer::Spec("late"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(DetailOf(status).reason(), v1::ERROR_REASON_DRAINING);
  EXPECT_THAT(status.error_message(), HasSubstr("shard " + AddressOf(*shards_[drained])));
  EXPECT_EQ(shards_[1 - drained]->Info().reserved_bytes(), reserved) << "the late session was taken back";
  EXPECT_TRUE(shards_[drained]->app().Wait().ok());
}

}  // namespace
}  // namespace precondor
