// SPDX-License-Identifier: Apache-2.0
// The journal and the election against a real etcd, as Debian packages it.
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <signal.h>
#include <string>
#include <sys/wait.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/mutex.h"
#include "server/etcd/etcd_client.h"
#include "server/etcd/etcd_election.h"
#include "server/etcd/etcd_log.h"
#include "server/recovery/record_codec.h"
#include "tests/support/child_process.h"
#include "tests/support/temp_dir.h"
#include "tests/unit/server/core/coordinator/coordinator_fixture.h"
#include "tests/unit/server/recovery/sample_records.h"

namespace precondor::etcd {
namespace {

using ::testing::HasSubstr;

// An etcd of one member in a directory of its own.
class EtcdServer {
 public:
  // Null when there is no etcd on this machine.
  static std::unique_ptr<EtcdServer> Start() {
    for (const char* program : {"/usr/bin/etcd", "/usr/local/bin/etcd"}) {
      if (std::filesystem::exists(program)) return std::unique_ptr<EtcdServer>(new EtcdServer(program));
    }
    return nullptr;
  }
  const std::string& endpoint() const { return endpoint_; }
  ChildProcess& process() { return *process_; }
  // Kills and starts it again on the same directory and ports.
  void Restart() {
    process_ = nullptr;
    process_ = std::make_unique<ChildProcess>(arguments_, true);
  }

 private:
  explicit EtcdServer(const std::string& program) {
    const int client = FreePort(), peer = FreePort();
    endpoint_ = absl::StrCat("127.0.0.1:", client);
    const std::string client_url = absl::StrCat("http://", endpoint_);
    const std::string peer_url = absl::StrCat("http://127.0.0.1:", peer);
    arguments_ = {program,
                  "--name=test",
                  absl::StrCat("--data-dir=", dir_.path(), "/etcd"),
                  absl::StrCat("--listen-client-urls=", client_url),
                  absl::StrCat("--advertise-client-urls=", client_url),
                  absl::StrCat("--listen-peer-urls=", peer_url),
                  absl::StrCat("--initial-advertise-peer-urls=", peer_url),
                  absl::StrCat("--initial-cluster=test=", peer_url),
                  "--log-level=error"};
    Restart();
  }

  const TempDir dir_;
  std::string endpoint_;
  std::vector<std::string> arguments_;
  std::unique_ptr<ChildProcess> process_;
};

class EtcdTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = EtcdServer::Start(); }
  static void TearDownTestSuite() { server_ = nullptr; }
  void SetUp() override {
    if (server_ == nullptr) GTEST_SKIP() << "no etcd on this machine: deploy/install.sh --test installs it";
    client_ = std::make_unique<EtcdClient>(EtcdOptions{.endpoints = {server_->endpoint()}, .credentials = nullptr});
    AwaitEtcd();
  }
  static void AwaitEtcd() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
    const auto channel = grpc::CreateCustomChannel(server_->endpoint(), grpc::InsecureChannelCredentials(), arguments);
    ASSERT_TRUE(channel->WaitForConnected(absl::ToChronoTime(absl::Now() + absl::Seconds(60)))) << "etcd did not start";
  }
  // A deployment of its own for each test.
  ElectionOptions Options(const std::string& identity, absl::Duration ttl = absl::Seconds(30)) const {
    ElectionOptions options;
    options.prefix = absl::StrCat("/", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    options.identity = identity;
    options.lease_ttl = ttl;
    options.retry = absl::Milliseconds(20);
    return options;
  }
  std::unique_ptr<EtcdElection> Elect(const std::string& identity) {
    auto election = std::make_unique<EtcdElection>(*client_, Options(identity), nullptr);
    const absl::Status status = election->Campaign();
    EXPECT_TRUE(status.ok()) << status;
    return election;
  }
  // A candidate that does not get to lead waits for this; it is stopped then.
  static absl::Status WaitsFor(EtcdClient& client, ElectionOptions options) {
    std::promise<absl::Status> told;
    options.on_waiting = [&, first = true](const absl::Status& why) mutable {
      if (std::exchange(first, false)) told.set_value(why);
    };
    EtcdElection candidate(client, std::move(options), nullptr);
    std::thread campaign([&] { EXPECT_TRUE(absl::IsCancelled(candidate.Campaign())); });
    auto why = told.get_future();
    const bool ready = why.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
    EXPECT_FALSE(candidate.Check().ok());
    candidate.Stop();
    campaign.join();
    return ready ? why.get() : absl::DeadlineExceededError("nothing told");
  }
  EtcdLog::Opened OpenLog(EtcdElection& election) {
    auto opened = EtcdLog::Open(*client_, election);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? *std::move(opened) : EtcdLog::Opened{};
  }

  static std::unique_ptr<EtcdServer> server_;
  std::unique_ptr<EtcdClient> client_;
};

std::unique_ptr<EtcdServer> EtcdTest::server_;

TEST_F(EtcdTest, TheNextLeaderFindsTheLastRecordOfEachKind) {
  auto first = Elect("first");
  {
    const auto log = OpenLog(*first);
    ASSERT_EQ(log.records.size(), 0u);
    MembershipRecord membership = {7, SampleMembership()};
    LeaseRecord lease = {7, SampleLease()};
    for (const CoordinatorRecord& record :
         {CoordinatorRecord(SampleSession(7)), CoordinatorRecord(SampleSession(8, "other")),
          CoordinatorRecord(membership), CoordinatorRecord(lease)}) {
      ASSERT_TRUE(log.journal->Append(record).ok());
    }
    lease.lease.durable_through = 500;
    ASSERT_TRUE(log.journal->Append(lease).ok());
    ASSERT_TRUE(log.journal->Append(CloseRecord{8}).ok());
    EXPECT_FALSE(log.journal->wants_compaction());
  }
  first->Stop();
  const auto second = Elect("second");
  const auto log = OpenLog(*second);
  ASSERT_EQ(log.records.size(), 3u);
  EXPECT_TRUE(Same(log.records[0], SampleSession(7)));
  EXPECT_TRUE(Same(log.records[1], MembershipRecord{7, SampleMembership()}));
  LeaseRecord lease = {7, SampleLease()};
  lease.lease.durable_through = 500;
  EXPECT_TRUE(Same(log.records[2], lease));
}

TEST_F(EtcdTest, ManySessionsComeBackInPages) {
  const auto election = Elect("only");
  const auto log = OpenLog(*election);
  for (uint64_t id = 1; id <= 150; ++id) {
    ASSERT_TRUE(log.journal->Append(SampleSession(id, absl::StrCat("job", id))).ok());
  }
  const auto again = OpenLog(*election);
  ASSERT_EQ(again.records.size(), 150u);
  for (uint64_t id = 1; id <= 150; ++id) {
    EXPECT_TRUE(Same(again.records[id - 1], SampleSession(id, absl::StrCat("job", id))));
  }
  // And a compaction leaves what it was given.
  ASSERT_TRUE(again.journal->Compact({SampleSession(3, "job3")}).ok());
  const auto compacted = OpenLog(*election);
  ASSERT_EQ(compacted.records.size(), 1u);
  EXPECT_TRUE(Same(compacted.records[0], SampleSession(3, "job3")));
}

TEST_F(EtcdTest, OneLeadsAndTheOtherWaitsUntilItIsStopped) {
  auto first = Elect("first");
  EXPECT_THAT(WaitsFor(*client_, Options("second")),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("first leads")));
  EXPECT_TRUE(first->Check().ok());
}

TEST_F(EtcdTest, DeploymentsOfOtherPrefixesAreApart) {
  const auto first = Elect("first");
  ElectionOptions options = Options("second");
  options.prefix += "-other";  // begins with the first one's
  EtcdElection second(*client_, options, nullptr);
  ASSERT_TRUE(second.Campaign().ok());
  ASSERT_TRUE(OpenLog(second).journal->Append(SampleSession(8, "other")).ok());
  const auto log = OpenLog(*first);
  EXPECT_TRUE(log.records.empty());
  ASSERT_TRUE(log.journal->Append(SampleSession(7)).ok());
  const auto other = OpenLog(second);
  ASSERT_EQ(other.records.size(), 1u);
  EXPECT_TRUE(Same(other.records[0], SampleSession(8, "other")));
}

TEST_F(EtcdTest, ACandidateThatReachesNoEtcdSaysSo) {
  const std::string nowhere = absl::StrCat("127.0.0.1:", FreePort());
  EtcdClient client({.endpoints = {nowhere}, .credentials = nullptr});
  EXPECT_THAT(WaitsFor(client, Options("only")), StatusIs(absl::StatusCode::kUnavailable, HasSubstr(nowhere)));
}

TEST_F(EtcdTest, AWriteOfALeaderThatWasReplacedIsRefused) {
  auto first = Elect("first");
  const auto log = OpenLog(*first);
  ASSERT_TRUE(log.journal->Append(SampleSession(1)).ok());
  // Another client removes the key, as the end of its lease would.
  etcdserverpb::TxnRequest remove;
  remove.add_success()->mutable_request_delete_range()->set_key(first->LeaderKey());
  ASSERT_TRUE(client_->Txn(remove).ok());
  const auto second = Elect("second");
  EXPECT_TRUE(first->Check().ok()) << "it does not know yet";
  EXPECT_THAT(log.journal->Append(CloseRecord{1}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("the leader is second")));
  EXPECT_EQ(first->Check().code(), absl::StatusCode::kFailedPrecondition) << "and stays so";
  EXPECT_EQ(OpenLog(*second).records.size(), 1u);
}

TEST_F(EtcdTest, AWriteThatWasGivenUpOnCannotOvertakeALaterOne) {
  const auto election = Elect("only");
  const auto early = OpenLog(*election);
  const auto late = OpenLog(*election);  // of the same leadership, after it
  ASSERT_TRUE(late.journal->Append(SampleSession(1)).ok());
  // As the network would deliver it late: with the sequence of when it was sent.
  etcdserverpb::TxnRequest stale;
  *stale.add_compare() = CreatedAt(election->LeaderKey(), election->revision());
  *stale.add_compare() = ModifiedAt(election->prefix() + "/sequence", 1);
  stale.add_success()->mutable_request_put()->set_key(election->prefix() + "/session/00000000000000000001/1");
  EXPECT_FALSE(client_->Txn(stale)->succeeded());
  // A journal that lost track catches up.
  EXPECT_TRUE(early.journal->Append(CloseRecord{1}).ok());
  EXPECT_TRUE(OpenLog(*election).records.empty());
}

TEST_F(EtcdTest, DamageAndNewerRecordsAreNamed) {
  const auto election = Elect("only");
  const std::string key = election->prefix() + "/session/00000000000000000001/4";
  const auto put = [&](const std::string& value) {
    etcdserverpb::TxnRequest request;
    request.add_success()->mutable_request_put()->set_key(key);
    request.mutable_success(0)->mutable_request_put()->set_value(value);
    ASSERT_TRUE(client_->Txn(request).ok());
  };
  put("\x8");
  absl::Status status = EtcdLog::Open(*client_, *election).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(key));
  put(*recovery::EncodeCoordinatorRecord(CloseRecord{2}));
  status = EtcdLog::Open(*client_, *election).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("session 2"));
  put(std::string("\xff\0\0\0\0\0\0\0\0", 9));
  EXPECT_EQ(EtcdLog::Open(*client_, *election).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(EtcdTest, ARecordThatIsTooLargeIsRefusedAndTheLeaderGoesOn) {
  const auto election = Elect("only");
  const auto log = OpenLog(*election);
  SessionRecord session = SampleSession(1);
  session.spec.layers[0].name = std::string(2 << 20, 'x');
  EXPECT_FALSE(log.journal->Append(session).ok());
  EXPECT_TRUE(log.journal->wants_compaction());
  EXPECT_TRUE(log.journal->Append(SampleSession(2)).ok());
  ASSERT_TRUE(log.journal->Compact({SampleSession(2)}).ok());
  EXPECT_FALSE(log.journal->wants_compaction());
}

// The whole story with processes: the leader is stopped for longer than its lease, another takes over, and the first
// wakes.
TEST_F(EtcdTest, AStoppedLeaderIsReplacedAndItsLaterWriteRefused) {
  const auto candidate = [&](const std::string& identity) {
    return std::make_unique<ChildProcess>(
        std::vector<std::string>{PRECONDOR_ETCD_CANDIDATE, server_->endpoint(), identity, "2"});
  };
  const auto first = candidate("first");
  ASSERT_EQ(first->ReadLine(), "leads 0");
  first->WriteLine("append 5 100");
  ASSERT_EQ(first->ReadLine(), "OK");
  const auto second = candidate("second");
  EXPECT_EQ(second->ReadLine(absl::Seconds(5)), std::nullopt) << "the lease is kept alive for longer than it lasts";
  first->WriteLine("check");
  ASSERT_EQ(first->ReadLine(), "OK");
  first->Signal(SIGSTOP);
  ASSERT_EQ(second->ReadLine(), "leads 1");
  second->WriteLine("append 5 200");
  ASSERT_EQ(second->ReadLine(), "OK");
  first->Signal(SIGCONT);
  first->WriteLine("append 5 999");
  EXPECT_EQ(first->ReadLine(), "FAILED_PRECONDITION");
  first->WriteLine("check");
  EXPECT_EQ(first->ReadLine(), "FAILED_PRECONDITION");
  second->Signal(SIGKILL);
  const auto third = candidate("third");
  ASSERT_EQ(third->ReadLine(), "leads 1");
  third->WriteLine("check");
  EXPECT_EQ(third->ReadLine(), "OK");

  etcdserverpb::RangeRequest request;
  request.set_key("/precondor/coordinator/session/00000000000000000005/3");
  const auto found = client_->Range(request);
  ASSERT_TRUE(found.ok() && found->kvs_size() == 1);
  const auto record = recovery::DecodeCoordinatorRecord(recovery::kLeaseRecord, found->kvs(0).value());
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(std::get<LeaseRecord>(*record).lease.durable_through, 200u);
}

TEST_F(EtcdTest, ALeaderThatCannotReachEtcdStopsLeadingAndSaysSoOnce) {
  Mutex mu;
  CondVar changed;
  std::vector<absl::Status> lost;
  EtcdClient impatient(
      {.endpoints = {server_->endpoint()}, .request_timeout = absl::Milliseconds(200), .credentials = nullptr});
  EtcdElection election(impatient, Options("only", absl::Seconds(2)), [&](const absl::Status& why) {
    MutexLock lock(mu);
    lost.push_back(why);
    changed.notify_all();
  });
  ASSERT_TRUE(election.Campaign().ok());
  auto log = EtcdLog::Open(impatient, election);
  ASSERT_TRUE(log.ok()) << log.status();
  server_->process().Signal(SIGSTOP);
  const absl::Status unreached = log->journal->Append(SampleSession(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(unreached) || absl::IsUnavailable(unreached)) << unreached;
  {
    mu.Lock();
    EXPECT_TRUE(changed.wait_for(mu, std::chrono::seconds(60), [&] { return !lost.empty(); }));
    mu.Unlock();
  }
  EXPECT_EQ(election.Check().code(), absl::StatusCode::kFailedPrecondition);
  server_->process().Signal(SIGCONT);
  AwaitEtcd();
  EXPECT_EQ(log->journal->Append(SampleSession(2)).code(), absl::StatusCode::kFailedPrecondition);
  election.Stop();
  MutexLock lock(mu);
  EXPECT_EQ(lost.size(), 1u);
}

TEST_F(EtcdTest, EtcdMayBeStartedAgainUnderALeader) {
  const auto election = Elect("only");
  const auto log = OpenLog(*election);
  ASSERT_TRUE(log.journal->Append(SampleSession(1)).ok());
  server_->Restart();
  AwaitEtcd();
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  absl::Status status;
  do {  // until the client has connected again
    status = log.journal->Append(CloseRecord{1});
  } while (absl::IsUnavailable(status) && absl::Now() < deadline);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(OpenLog(*election).records.empty());
}

class EtcdCoordinatorTest : public CoordinatorFixture {
 protected:
  EtcdCoordinatorTest() {
    spec.method.name = "mkor";  // a record has only methods that have messages
    options.make_method = [](const MethodConfig&) {
      return std::make_unique<FakeMethod>(std::make_shared<FakeMethodLog>(), true);
    };
  }
};

TEST_F(EtcdCoordinatorTest, ACoordinatorGoesOnWhereTheLastLeaderWas) {
  const auto server = EtcdServer::Start();
  if (server == nullptr) GTEST_SKIP() << "no etcd on this machine: deploy/install.sh --test installs it";
  EtcdClient client({.endpoints = {server->endpoint()}, .credentials = nullptr});
  uint64_t id = 0, granted = 0;
  for (const bool restarted : {false, true}) {
    ElectionOptions election_options;
    election_options.identity = restarted ? "second" : "first";
    EtcdElection election(client, election_options, nullptr);
    ASSERT_TRUE(election.Campaign().ok());
    auto opened = EtcdLog::Open(client, election);
    ASSERT_TRUE(opened.ok()) << opened.status();
    journal_in_use = opened->journal.get();
    MakeCoordinator();
    ASSERT_TRUE(coordinator->Restore(opened->records).ok());
    if (!restarted) {
      id = Open();
      for (uint32_t rank = 0; rank < 2; ++rank) ASSERT_TRUE(coordinator->JoinSession("job", rank, 5, 0).ok());
      for (uint64_t step = 0; step < 30; ++step) {
        for (uint32_t rank = 0; rank < 2; ++rank) {
          granted = coordinator->ReportStep(Report(id, 1, rank, step, 1))->lease_through_step;
        }
      }
    } else {
      EXPECT_EQ(coordinator->GetSession("job")->session_id, id);
      EXPECT_GE(coordinator->JoinSession("job", 0, 5, 30)->directive.lease_through_step, granted);
    }
    coordinator = nullptr;
    election.Stop();
  }
}

}  // namespace
}  // namespace precondor::etcd
