// SPDX-License-Identifier: Apache-2.0
// Which listener gets a path in the file system, and which one loses it.
#include "server/net/unix_listener.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <future>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace precondor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A socket of the test's own at `path`, bound or connected; the errno where that failed.
class Peer {
 public:
  using Call = int (*)(int, const sockaddr*, socklen_t);
  Peer(Call call, const std::string& path) : fd_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    error_ = call(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ? 0 : errno;
  }
  ~Peer() { close(fd_); }
  int error() const { return error_; }
  int fd() const { return fd_; }

 private:
  int fd_;
  int error_ = 0;
};

class UnixListenerTest : public ::testing::Test {
 protected:
  // A process that was killed leaves this socket.
  void LeaveSocket() { EXPECT_EQ(Peer(bind, path_).error(), 0); }
  int Dial() { return Peer(connect, path_).error(); }
  bool there() const { return std::filesystem::exists(std::filesystem::symlink_status(path_)); }

  const TempDir folder_;
  const std::string path_ = folder_.path() + "/s";
};

TEST_F(UnixListenerTest, HandsConnectionsOverAndRemovesItsFile) {
  auto listener = UnixListener::Bind(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const Peer early(connect, path_);
  EXPECT_EQ(early.error(), 0) << "connections wait for Serve";
  std::promise<int> first;
  (*listener)->Serve([&first](int fd) { first.set_value(fd); }, [](int) {});
  const int fd = first.get_future().get();
  ASSERT_EQ(send(early.fd(), "x", 1, 0), 1);
  char got = 0;
  while (recv(fd, &got, 1, 0) < 0) ASSERT_EQ(errno, EAGAIN) << "a descriptor that blocks would have waited";
  EXPECT_EQ(got, 'x');
  close(fd);
  (*listener)->Stop();
  EXPECT_FALSE(there());
  EXPECT_EQ(Dial(), ENOENT);
  (*listener)->Stop();
}

TEST_F(UnixListenerTest, APeersUserIsKnown) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  EXPECT_TRUE(CheckPeerUser(ends[0], geteuid()).ok());
  EXPECT_THAT(CheckPeerUser(ends[0], geteuid() + 1),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("expected a process of user")));
  close(ends[0]);
  close(ends[1]);
  EXPECT_EQ(CheckPeerUser(ends[0], geteuid()).code(), absl::StatusCode::kUnavailable);
}

TEST_F(UnixListenerTest, OnlyItsUserMayConnectWhateverTheMask) {
  const mode_t mask = umask(0);
  const auto listener = UnixListener::Bind(path_);
  umask(mask);
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat file = {};
  ASSERT_EQ(lstat(path_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode, static_cast<mode_t>(S_IFSOCK | S_IRUSR | S_IWUSR));
}

TEST_F(UnixListenerTest, ReplacesASocketThatNobodyAnswersAt) {
  LeaveSocket();
  ASSERT_EQ(Dial(), ECONNREFUSED);
  const auto listener = UnixListener::Bind(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_EQ(Dial(), 0);
}

TEST_F(UnixListenerTest, LeavesAPathAloneThatIsInUse) {
  const auto first = UnixListener::Bind(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(UnixListener::Bind(path_), StatusIs(absl::StatusCode::kAlreadyExists,
                                                  AllOf(HasSubstr(path_), HasSubstr("another process listens"))));
  EXPECT_EQ(Dial(), 0);
}

TEST_F(UnixListenerTest, LeavesFilesAloneThatAreNoSockets) {
  std::ofstream(path_) << "precious";
  EXPECT_THAT(UnixListener::Bind(path_),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("expected a socket or nothing, got another file")));
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
}

TEST_F(UnixListenerTest, TellsWhyAPathCannotBe) {
  EXPECT_THAT(UnixListener::Bind(folder_.path() + "/none/s"),
              StatusIs(absl::StatusCode::kUnavailable, AllOf(HasSubstr("/none/s"), HasSubstr("No such file"))));
}

TEST_F(UnixListenerTest, OfSeveralAtOnceOneGetsThePath) {
  for (int round = 0; round < 20; ++round) {
    LeaveSocket();
    std::vector<absl::StatusOr<std::unique_ptr<UnixListener>>> listeners(4);
    std::vector<std::thread> threads;
    std::atomic<size_t> ready = 0;
    for (auto& listener : listeners) {
      threads.emplace_back([&, to = &listener] {
        ++ready;
        while (ready < listeners.size()) std::this_thread::yield();
        *to = UnixListener::Bind(path_);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(std::count_if(listeners.begin(), listeners.end(), [](const auto& one) { return one.ok(); }), 1);
    EXPECT_EQ(Dial(), 0) << "and its file is there";
    listeners.clear();
    ASSERT_FALSE(there());
  }
}

TEST_F(UnixListenerTest, AServerWhosePathWasTakenLeavesItToTheSuccessor) {
  const auto first = UnixListener::Bind(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(std::filesystem::remove(path_));
  const auto second = UnixListener::Bind(path_);
  ASSERT_TRUE(second.ok()) << second.status();
  (*first)->Stop();
  EXPECT_TRUE(there());
  EXPECT_EQ(Dial(), 0);
}

}  // namespace
}  // namespace precondor
