// SPDX-License-Identifier: Apache-2.0
// Connections over TCP, and what happens when no descriptor is free.
#include "server/net/acceptor.h"

#include <arpa/inet.h>
#include <atomic>
#include <cerrno>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/wait_until.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A connected socket; 0 or errno.
int Dial(int fd, int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
}

TEST(AcceptorTest, AcceptsAgainAsSoonAsADescriptorIsFree) {
#ifdef PRECONDOR_SANITIZED
  GTEST_SKIP() << "UBSan needs descriptors of its own";
#endif
  const absl::StatusOr<TcpSocket> listening = ListenTcp("127.0.0.1:0");
  ASSERT_TRUE(listening.ok()) << listening.status();
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const absl::Cleanup closing = [client] { close(client); };
  Acceptor acceptor(listening->fd);
  std::vector<int> taken;
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit before = limit;
  limit.rlim_cur = 256;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  for (int fd = dup(client); fd >= 0; fd = dup(client)) taken.push_back(fd);
  std::atomic<int> error = 0, accepted = -1;
  acceptor.Start([&](int fd) { accepted = fd; }, [&](int why) { error = why; });
  EXPECT_EQ(Dial(client, listening->port), 0) << "the system connects";
  EXPECT_TRUE(WaitUntil([&] { return error != 0; }));
  EXPECT_EQ(error, EMFILE);
  EXPECT_EQ(accepted, -1);
  close(taken.back());
  taken.pop_back();
  EXPECT_TRUE(WaitUntil([&] { return accepted != -1; }));
  for (const int fd : taken) close(fd);
  setrlimit(RLIMIT_NOFILE, &before);
  int no_delay = 0;
  socklen_t size = sizeof(no_delay);
  EXPECT_EQ(getsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &no_delay, &size), 0);
  EXPECT_EQ(no_delay, 1);
  close(accepted);
  acceptor.Stop();
  const int late = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(Dial(late, listening->port), ECONNREFUSED);
  close(late);
}

TEST(TcpListenerTest, APortBelongsToOne) {
  const absl::StatusOr<TcpSocket> first = ListenTcp("127.0.0.1:0");
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = absl::StrCat("127.0.0.1:", first->port);
  const absl::StatusOr<TcpSocket> second = ListenTcp(address);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), AllOf(HasSubstr(address), HasSubstr("in use")));
  close(first->fd);
  const absl::StatusOr<TcpSocket> third = ListenTcp(address);
  ASSERT_TRUE(third.ok()) << third.status();
  close(third->fd);
}

TEST(TcpListenerTest, EveryAddressOfTheMachineIsServed) {
  const absl::StatusOr<TcpSocket> all = ListenTcp("0.0.0.0:0");
  ASSERT_TRUE(all.ok()) << all.status();
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(Dial(client, all->port), 0);
  close(client);
  close(all->fd);
}

TEST(TcpListenerTest, TellsWhatAnAddressLacks) {
  EXPECT_THAT(std::string(ListenTcp("nowhere").status().message()), HasSubstr("expected host:port"));
  EXPECT_THAT(std::string(ListenTcp("no.such.host.invalid:1").status().message()), HasSubstr("no.such.host.invalid:1"));
  EXPECT_THAT(std::string(ListenTcp("nowhere", "metrics_listen").status().message()), StartsWith("metrics_listen: "));
}

}  // namespace
}  // namespace precondor
