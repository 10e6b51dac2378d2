// SPDX-License-Identifier: Apache-2.0
// A shard is told to remove a session of a job that is training, and gets it again from the coordinator within one
// process: no rank goes on as if nothing had happened. Real servers and clients over TCP.
#include <barrier>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "precondor/client.h"
#include "precondor/v1/shard.grpc.pb.h"
#include "tests/loopback/raw_client.h"
#include "tests/loopback/service_client.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

constexpr int64_t kRows = 6, kCols = 5;
constexpr uint64_t kSteps = 8, kRemovedBefore = 4;

class SessionRemovedTest : public ::testing::TestWithParam<bool> {
 protected:
  SessionRemovedTest() {
    ServerConfig shard;
    shard.role = ServerRole::kShard;
    if (GetParam()) shard.data_dir = data_.path();
    shard_ = std::make_unique<RawServer>(shard);
    ServerConfig coordinator;
    coordinator.role = ServerRole::kCoordinator;
    coordinator.reconcile_interval_ms = 20;
    coordinator.shards = {shard_->address()};
    coordinator_ = std::make_unique<RawServer>(coordinator);
    client_ = ConnectTo(coordinator_->address());
    spec_.name = "job";
    spec_.world_size = 2;
    spec_.statistics = StatisticsKind::kPerWorkerMean;
    spec_.inv_freq = 1;
    spec_.layers.push_back({"layer", kRows, kCols, false});
  }

  // The coordinator's call to the shard when a session is over, with the coordinator's own token.
  void RemoveFromShard() {
    const std::unique_ptr<v1::ShardService::Stub> stub = v1::ShardService::NewStub(shard_->channel());
    const uint64_t token = CurrentToken(*stub);
    v1::DescribeShardRequest describe;
    describe.set_fencing_token(token);
    v1::DescribeShardResponse described;
    TimedContext asking, removing;
    ASSERT_TRUE(stub->DescribeShard(&asking, describe, &described).ok());
    ASSERT_EQ(described.sessions_size(), 1);
    v1::RemoveSessionRequest request;
    request.set_session_id(described.sessions(0).session_id());
    request.set_fencing_token(token);
    v1::RemoveSessionResponse response;
    const grpc::Status status = stub->RemoveSession(&removing, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ASSERT_TRUE(response.existed());
  }
  // As the refusal of a smaller one names it.
  static uint64_t CurrentToken(v1::ShardService::Stub& stub) {
    v1::DescribeShardRequest request;
    request.set_fencing_token(1);
    v1::DescribeShardResponse response;
    TimedContext context;
    const std::string refusal = stub.DescribeShard(&context, request, &response).error_message();
    const std::string before = "expected at least ";
    uint64_t token = 0;
    const size_t at = refusal.find(before);
    EXPECT_NE(at, std::string::npos) << refusal;
    if (at != std::string::npos) token = std::stoull(refusal.substr(at + before.size()));
    return token;
  }

  static absl::Status Step(Worker& worker, uint64_t step) {
    const std::vector<float> a(kCols, 0.5f), g(kRows, static_cast<float>(step + 1));
    std::vector<float> d(kRows * kCols, 1.0f);
    const absl::Status sent =
        worker.SendStatistics(step, 0, ConstMatrixView(a.data(), 1, kCols), ConstMatrixView(g.data(), 1, kRows), 1);
    if (!sent.ok()) return sent;
    const MatrixView view(d.data(), kRows, kCols);
    const absl::StatusOr<Preconditioned> answer = worker.Precondition(step, 0, {view, view}, 1).Wait();
    if (!answer.ok()) return answer.status();
    return worker.ReportStep(step, 1.0, 1, true, 0.1).Wait().status();
  }

  // How a rank's training ends when the session is removed from the shard between two steps, and what it is told.
  struct End {
    absl::Status status;
    std::map<int64_t, uint64_t> lost;
  };
  std::vector<End> Train() {
    EXPECT_TRUE(client_->OpenSession(spec_).ok());
    std::vector<End> ends(2);
    std::barrier<> together(2);
    ForEachRank(2, [&](uint32_t rank) {
      const std::unique_ptr<Worker> worker = client_->Join("job", {.rank = rank, .incarnation = 1}).value();
      for (uint64_t step = 0; step < kSteps && ends[rank].status.ok(); ++step) {
        if (step == kRemovedBefore) {
          together.arrive_and_wait();
          if (rank == 0) RemoveFromShard();
          together.arrive_and_wait();
        }
        ends[rank].status = Step(*worker, step);
      }
      ends[rank].lost = worker->status().lost_updates;
    });
    return ends;
  }

  TempDir data_;
  std::unique_ptr<RawServer> shard_, coordinator_;
  std::unique_ptr<Client> client_;
  SessionSpec spec_;
};

// Both ranks have the same answers: they go on with factors that are new, and each is told how many updates are lost.
TEST_P(SessionRemovedTest, ReplicasAreToldThatItsMemoryIsLost) {
  for (const End& end : Train()) {
    EXPECT_TRUE(end.status.ok()) << end.status;
    EXPECT_EQ(end.lost, (std::map<int64_t, uint64_t>{{0, kRemovedBefore}}));
  }
}

INSTANTIATE_TEST_SUITE_P(Disks, SessionRemovedTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "WithADisk" : "WithoutADisk"; });

}  // namespace
}  // namespace precondor
