// SPDX-License-Identifier: Apache-2.0
// Peers that take too many connections and streams and too much time, byte by byte on a server that only answers health
// checks.
#include "server/net/connection_watch.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <memory>
#include <netinet/in.h>
#include <string>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "server/net/listeners.h"
#include "tests/loopback/raw_client.h"
#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr int kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kUnknown = 99;  // types of frames (RFC 9113)
constexpr int kEndHeaders = 4, kAck = 1;

std::string Frame(int type, int flags, uint32_t stream, const std::string& payload) {
  std::string frame;
  for (const int shift : {16, 8, 0}) frame.push_back(static_cast<char>(payload.size() >> shift));
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  for (const int shift : {24, 16, 8, 0}) frame.push_back(static_cast<char>(stream >> shift));
  return frame + payload;
}

// The headers of a call, whose message never comes.
std::string Call(uint32_t stream) {
  std::string block;
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{":method", "POST"},
                                                        {":scheme", "http"},
                                                        {":authority", "a"},
                                                        {"te", "trailers"},
                                                        {":path", "/grpc.health.v1.Health/Check"},
                                                        {"content-type", "application/grpc"}}) {
    absl::StrAppend(&block, std::string(1, '\0'), std::string(1, static_cast<char>(name.size())), name,
                    std::string(1, static_cast<char>(value.size())), value);
  }
  return Frame(kHeaders, kEndHeaders, stream, block);
}

// A connection from an address of this machine, which has sent what HTTP/2 begins with.
class Peer {
 public:
  Peer(int port, const char* from) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval limit = {.tv_sec = 60, .tv_usec = 0};  // a read that waits longer fails
    EXPECT_EQ(setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    inet_pton(AF_INET, from, &address.sin_addr);
    EXPECT_EQ(bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, ""));
  }
  ~Peer() { close(fd_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void Send(const std::string& bytes) const {
    for (size_t sent = 0; sent < bytes.size();) {
      const ssize_t n = send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return;  // ended meanwhile
      sent += static_cast<size_t>(n);
    }
  }
  // Returns true if the server answers a PING, and so has read all before it; false if the connection ends.
  bool Ping() const { return absl::StrContains(BytesUntilPing(), kPayload); }
  // All that the server sends until it answers a PING or ends the connection.
  std::string BytesUntilPing() const { return Ask(Frame(kPing, 0, 0, kPayload), kPayload); }
  // As Ping, but gRPC ends no connection for many of them: the server acknowledges a SETTINGS frame. As the constructor
  // has sent one, it has read all before the call before this one.
  bool IsRead() const {
    const std::string acknowledgement = Frame(kSettings, kAck, 0, "");
    return absl::StrContains(Ask(Frame(kSettings, 0, 0, ""), acknowledgement), acknowledgement);
  }

 private:
  static constexpr char kPayload[] = "pingpong";

  std::string Ask(const std::string& frame, const std::string& answer) const {
    Send(frame);
    std::string seen(4096, '\0');
    std::string all;
    for (ssize_t n = 0; !absl::StrContains(all, answer) && (n = recv(fd_, seen.data(), seen.size(), 0)) > 0;) {
      all.append(seen, 0, static_cast<size_t>(n));
    }
    return all;
  }

  const int fd_;
};

class ConnectionWatchTest : public ::testing::Test {
 protected:
  ConnectionWatchTest() {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    auto bound = Listeners::Bind({"127.0.0.1:0"}, grpc::InsecureServerCredentials(), builder);
    EXPECT_TRUE(bound.ok()) << bound.status();
    listeners_ = *std::move(bound);
    server_ = builder.BuildAndStart();
    listeners_->Start(*server_, {.check_unix_peer = nullptr,
                                 .refused =
                                     [this](const absl::Status& why) {
                                       MutexLock lock(mu_);
                                       refused_.emplace_back(why.message());
                                     },
                                 .failed = [](const std::string& why) { ADD_FAILURE() << why; }});
  }
  ~ConnectionWatchTest() override {
    listeners_->Stop();
    server_->Shutdown(std::chrono::system_clock::now());
  }

  int port() const { return listeners_->port(); }
  std::vector<std::string> refused() {
    MutexLock lock(mu_);
    return refused_;
  }
  std::vector<std::string> Check(absl::Time now) {
    listeners_->CheckConnections(now);
    return refused();
  }
  // Checks until a connection has been ended.
  std::vector<std::string> AwaitEnd() {
    EXPECT_TRUE(WaitUntil([this] { return !Check(MonotonicNow()).empty(); }));
    return refused();
  }

  Mutex mu_;
  std::vector<std::string> refused_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Listeners> listeners_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(ConnectionWatchTest, TellsClientsHowManyStreamsAConnectionMayHave) {
  // SETTINGS_MAX_CONCURRENT_STREAMS (3) is 1024.
  EXPECT_THAT(Peer(port(), "127.0.0.9").BytesUntilPing(), HasSubstr(std::string("\0\3\0\0\4\0", 6)));
}

TEST_F(ConnectionWatchTest, EndsAConnectionWithTooManyStreamsWhateverItAcknowledges) {
  const Peer other(port(), "127.0.0.8"), hostile(port(), "127.0.0.9");
  for (const int before : {10, 5}) EXPECT_THAT(Check(MonotonicNow() - absl::Seconds(before)), IsEmpty());  // silence
  std::string calls;
  for (uint32_t i = 0; i <= ConnectionWatch::kMostStreamsOfPeer; ++i) calls += Call(2 * i + 1);
  hostile.Send(calls);
  EXPECT_THAT(AwaitEnd(), ElementsAre(AllOf(StartsWith("127.0.0.9: "), HasSubstr("open streams"))));
  EXPECT_FALSE(hostile.Ping());
  EXPECT_FALSE(Peer(port(), "127.0.0.9").Ping()) << "refused for a time";
  EXPECT_TRUE(other.Ping());
  EXPECT_TRUE(Peer(port(), "127.0.0.8").Ping());
}

TEST_F(ConnectionWatchTest, CountsTheStreamsOfAllConnectionsOfAPeer) {
  std::vector<std::unique_ptr<Peer>> peers;
  for (int i = 0; i < 4; ++i) peers.push_back(std::make_unique<Peer>(port(), "127.0.0.9"));
  std::string calls;
  for (uint32_t i = 0; i < ConnectionWatch::kMostStreamsOfPeer / 3; ++i) calls += Call(2 * i + 1);
  for (const auto& peer : peers) {
    peer->Send(calls);
    EXPECT_TRUE(peer->Ping());
  }
  AwaitEnd();
  int open = 0;
  for (const auto& peer : peers) open += peer->Ping() ? 1 : 0;
  EXPECT_EQ(open, 3);
}

TEST_F(ConnectionWatchTest, EndsAConnectionThatResetsItsStreams) {
  const Peer hostile(port(), "127.0.0.9");
  absl::Time now = MonotonicNow();
  uint32_t stream = 1;
  // 50 in a millisecond of the test's clock. On a slow machine the server answers most of them before it reads their
  // ends, and those do not count, or it ends them so late that they count as open.
  EXPECT_TRUE(WaitUntil([&] {
    std::string calls;
    for (const uint32_t end = stream + 100; stream < end; stream += 2) {
      calls += Call(stream) + Frame(kReset, 0, stream, std::string("\0\0\0\x8", 4));
    }
    hostile.Send(calls);
    return !hostile.IsRead() || !Check(now += absl::Milliseconds(1)).empty();
  }));
  EXPECT_THAT(refused(), ElementsAre(AnyOf(HasSubstr("calls in a second that end before they are answered"),
                                           HasSubstr("open streams"))));
  EXPECT_FALSE(hostile.Ping());
}

TEST_F(ConnectionWatchTest, EndsAConnectionWhoseMessageDoesNotEnd) {
  const Peer idle(port(), "127.0.0.9"), hostile(port(), "127.0.0.9");
  for (int i = 0; i < 40; ++i) hostile.Send(Frame(kUnknown, 0, 0, std::string(16000, 'x')));
  EXPECT_TRUE(hostile.Ping());
  const absl::Time start = MonotonicNow();
  EXPECT_THAT(Check(start), IsEmpty());
  EXPECT_THAT(Check(start + ConnectionWatch::kMessageTime), IsEmpty()) << "640,000 bytes have 0.6 s more";
  EXPECT_THAT(Check(start + ConnectionWatch::kMessageTime + absl::Seconds(1)),
              ElementsAre(HasSubstr("bytes have made no whole message in 30s")));
  EXPECT_FALSE(hostile.Ping());
  EXPECT_TRUE(idle.Ping());
}

TEST_F(ConnectionWatchTest, APeerHasSoManyConnectionsAndOthersHaveTheirs) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  std::vector<std::unique_ptr<Peer>> peers;
  for (size_t i = 0; i < ConnectionWatch::kMostConnectionsOfPeer; ++i) {
    peers.push_back(std::make_unique<Peer>(port(), "127.0.0.9"));
  }
  EXPECT_TRUE(peers.back()->Ping());
  EXPECT_FALSE(Peer(port(), "127.0.0.9").Ping());
  EXPECT_THAT(refused(), ElementsAre("127.0.0.9: expected at most 512 connections, got one more"));
  EXPECT_TRUE(Peer(port(), "127.0.0.8").Ping());
  peers.clear();
  EXPECT_TRUE(WaitUntil([this] { return Peer(port(), "127.0.0.9").Ping(); }));
}

TEST(CompressionTest, CompressedMessagesAreRefusedAndNotDecompressed) {
  RawServer server;
  v1::OpenSessionRequest request;
  request.mutable_spec()->set_name(std::string(64 << 20, 'x'));
  TimedContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::OpenSessionResponse response;
  const grpc::Status status = server.sessions->OpenSession(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("gzip"));
  server.OpenAndJoin("another");
}

}  // namespace
}  // namespace precondor
