// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/shared_channel.h"

#include <atomic>
#include <cstring>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"

namespace precondor::wire {
namespace {

using ::testing::HasSubstr;

grpc::ByteBuffer Message(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// One side of a channel, which keeps what it has read.
class Peer {
 public:
  Peer(SharedChannel::Side side, std::unique_ptr<SharedMemory> memory, bool reads = true)
      : reads_(reads),
        channel_(*SharedChannel::Start(side, std::move(memory),
                                       {.read = [this](absl::string_view message) { return Read(message); },
                                        .written = [this] { Note(&Peer::written_); },
                                        .broken =
                                            [this](const absl::Status& status) {
                                              MutexLock lock(mu_);
                                              broken_ = status;
                                              changed_.notify_all();
                                            }})) {}

  SharedChannel& channel() { return *channel_; }
  void End() { channel_ = nullptr; }
  bool WaitForMessages(size_t count) {
    return WaitFor([this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return messages_.size() >= count; });
  }
  bool WaitForWritten(int count) {
    return WaitFor([this, count]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return written_ >= count; });
  }
  absl::Status WaitForBroken() {
    WaitFor([this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !broken_.ok(); });
    MutexLock lock(mu_);
    return broken_;
  }
  std::vector<std::string> messages() {
    MutexLock lock(mu_);
    return messages_;
  }
  void ReadOn() {
    {
      MutexLock lock(mu_);
      reads_ = true;
    }
    channel_->Resume();
  }

 private:
  bool Read(absl::string_view message) {
    MutexLock lock(mu_);
    messages_.emplace_back(message);
    changed_.notify_all();
    return reads_;
  }
  void Note(int Peer::*counter) {
    MutexLock lock(mu_);
    ++(this->*counter);
    changed_.notify_all();
  }
  template <typename Condition>
  bool WaitFor(Condition condition) {
    MutexLock lock(mu_);
    return changed_.wait_until(mu_, SteadyTime(MonotonicNow() + absl::Seconds(60)), condition);
  }

  Mutex mu_;
  CondVar changed_;
  bool reads_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> messages_ ABSL_GUARDED_BY(mu_);
  int written_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status broken_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<SharedChannel> channel_;
};

// Creates memory, and opens it as another process would.
std::pair<std::unique_ptr<SharedMemory>, std::unique_ptr<SharedMemory>> SharedPair() {
  std::unique_ptr<SharedMemory> created = *SharedMemory::Create();
  std::unique_ptr<SharedMemory> opened = *SharedMemory::Open(created->handle());
  return {std::move(created), std::move(opened)};
}

TEST(SharedMemoryTest, RefusesWhatIsNotThePeersMemory) {
  const std::unique_ptr<SharedMemory> memory = *SharedMemory::Create();
  const std::string handle = memory->handle();
  std::string other_token = handle;
  other_token[3] ^= 1;
  const int plain = memfd_create("plain", MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(plain, static_cast<off_t>(SharedMemory::kBytes)), 0);
  for (const std::string& bad :
       {std::string(), std::string(16, 'x'), handle.substr(0, 16) + "/etc/passwd", other_token,
        absl::StrCat(handle.substr(0, 16), "/proc/self/fd/", plain), handle.substr(0, 16) + "/proc/self/mem",
        handle.substr(0, 16) + "/proc/self/fd/1000000", handle.substr(0, 16) + "/proc/" + std::string(5000, 'x')}) {
    EXPECT_EQ(SharedMemory::Open(bad).status().code(), absl::StatusCode::kUnavailable) << bad;
  }
  close(plain);
  EXPECT_TRUE(SharedMemory::Open(handle).ok());
}

TEST(SharedMemoryTest, APeerCannotShrinkIt) {
  const std::unique_ptr<SharedMemory> memory = *SharedMemory::Create();
  const int file = open(memory->handle().c_str() + 16, O_RDWR);
  ASSERT_GE(file, 0);
  EXPECT_NE(ftruncate(file, 0), 0);
  EXPECT_NE(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), 0);
  close(file);
}

TEST(SharedChannelTest, CarriesMessagesBothWays) {
  auto [created, opened] = SharedPair();
  Peer server(SharedChannel::Side::kServer, std::move(created));
  Peer client(SharedChannel::Side::kClient, std::move(opened));
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(client.channel().Write(Message(absl::StrCat("to server ", i))));
    EXPECT_TRUE(server.channel().Write(Message(absl::StrCat("to client ", i))));
  }
  ASSERT_TRUE(server.WaitForMessages(100));
  ASSERT_TRUE(client.WaitForMessages(100));
  EXPECT_EQ(server.messages()[99], "to server 99");
  EXPECT_EQ(client.messages()[99], "to client 99");
}

TEST(SharedChannelTest, KeepsAMessageUntilThereIsRoom) {
  auto [created, opened] = SharedPair();
  Peer server(SharedChannel::Side::kServer, std::move(created), /*reads=*/false);
  Peer client(SharedChannel::Side::kClient, std::move(opened));
  const std::string large(SharedMemory::kPipeBytes / 2, 'x');
  EXPECT_TRUE(client.channel().Write(Message("first")));
  ASSERT_TRUE(server.WaitForMessages(1));  // then it reads no more
  EXPECT_FALSE(client.channel().Write(Message(large)));
  ASSERT_TRUE(client.WaitForWritten(1));
  ASSERT_FALSE(client.channel().Write(Message(large + "!")));
  EXPECT_EQ(server.messages().size(), 1u);
  server.ReadOn();
  ASSERT_TRUE(client.WaitForWritten(2));
  ASSERT_TRUE(server.WaitForMessages(3));
  EXPECT_EQ(server.messages()[1], large);
  EXPECT_EQ(server.messages()[2], large + "!");
}

TEST(SharedChannelTest, AClientReadsWhatIsThereWhenTheStreamEnds) {
  auto [created, opened] = SharedPair();
  Peer server(SharedChannel::Side::kServer, std::move(created));
  for (int i = 0; i < 1000; ++i) server.channel().Write(Message("answer"));
  Peer client(SharedChannel::Side::kClient, std::move(opened));
  server.End();
  client.End();
  EXPECT_EQ(client.messages().size(), 1000u);
}

TEST(SharedChannelTest, LargeMessagesAreWrittenByTheThread) {
  auto [created, opened] = SharedPair();
  Peer server(SharedChannel::Side::kServer, std::move(created));
  Peer client(SharedChannel::Side::kClient, std::move(opened));
  const std::string large(size_t{1} << 20, 'x');
  for (int i = 1; i <= 10; ++i) {
    ASSERT_FALSE(client.channel().Write(Message(large)));
    ASSERT_TRUE(client.WaitForWritten(i));
  }
  ASSERT_TRUE(server.WaitForMessages(10));
  EXPECT_EQ(server.messages()[9], large);
}

// Two sides wake each other in turns.
TEST(DoorbellTest, LosesNoRing) {
  const std::unique_ptr<SharedMemory> memory = *SharedMemory::Create();
  constexpr int kRounds = 20000;
  std::atomic<int> turn = 0, lost = 0;
  const auto play = [&](int own, Doorbell& mine, Doorbell& other) {
    for (int round = 0; round < kRounds; ++round) {
      while (true) {
        const uint32_t seen = mine.rings();
        if (turn.load() % 2 == own) break;
        if (!mine.Wait(seen) && mine.rings() != seen) ++lost;
      }
      ++turn;
      other.Ring();
    }
  };
  std::thread other([&] { play(1, memory->client_doorbell(), memory->server_doorbell()); });
  play(0, memory->server_doorbell(), memory->client_doorbell());
  other.join();
  EXPECT_EQ(turn.load(), 2 * kRounds);
  EXPECT_EQ(lost.load(), 0);
}

TEST(SharedChannelTest, ResumeMayComeBeforeThePause) {
  auto [created, opened] = SharedPair();
  Mutex mu;
  CondVar changed;
  int messages = 0;
  std::unique_ptr<SharedChannel> server;
  server = *SharedChannel::Start(SharedChannel::Side::kServer, std::move(created),
                                 {.read =
                                      [&](absl::string_view) {
                                        MutexLock lock(mu);
                                        ++messages;
                                        changed.notify_all();
                                        server->Resume();
                                        return false;
                                      },
                                  .written = [] {},
                                  .broken = [](const absl::Status&) {}});
  Peer client(SharedChannel::Side::kClient, std::move(opened));
  for (int i = 0; i < 10; ++i) client.channel().Write(Message("x"));
  MutexLock lock(mu);
  EXPECT_TRUE(changed.wait_until(mu, SteadyTime(MonotonicNow() + absl::Seconds(60)), [&] { return messages == 10; }));
}

TEST(SharedChannelTest, ReportsAPeerThatBreaksThePipe) {
  std::unique_ptr<SharedMemory> created = *SharedMemory::Create();
  const std::unique_ptr<SharedMemory> hostile = *SharedMemory::Open(created->handle());
  Peer server(SharedChannel::Side::kServer, std::move(created));
  hostile->ToServer().positions->written.store(5);
  hostile->server_doorbell().Ring();
  EXPECT_THAT(std::string(server.WaitForBroken().message()), HasSubstr("shared memory"));
}

TEST(SharedChannelTest, ReportsAReaderThatBreaksThePipe) {
  std::unique_ptr<SharedMemory> created = *SharedMemory::Create();
  const std::unique_ptr<SharedMemory> hostile = *SharedMemory::Open(created->handle());
  Peer server(SharedChannel::Side::kServer, std::move(created));
  hostile->ToClient().positions->read.store(100);
  server.channel().Write(Message("x"));
  EXPECT_THAT(std::string(server.WaitForBroken().message()), HasSubstr("shared memory"));
}

TEST(SharedChannelTest, APeerThatHoldsTheDoorbellCannotKeepAChannelFromEnding) {
  std::unique_ptr<SharedMemory> created = *SharedMemory::Create();
  const std::unique_ptr<SharedMemory> hostile = *SharedMemory::Open(created->handle());
  bool ended = false;
  Mutex mu;
  std::thread other([&] {
    // Undoes every ring.
    while (true) {
      std::memset(static_cast<void*>(&hostile->server_doorbell()), 0, sizeof(Doorbell));
      MutexLock lock(mu);
      if (ended) return;
    }
  });
  { Peer server(SharedChannel::Side::kServer, std::move(created)); }
  {
    MutexLock lock(mu);
    ended = true;
  }
  other.join();
}

}  // namespace
}  // namespace precondor::wire
