// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/shared_memory.h"

#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <thread>

namespace precondor::wire {
namespace {

using ::testing::Optional;

class MessagePipeTest : public ::testing::Test {
 protected:
  // Reads one message, or "none".
  std::string Read() {
    const auto front = reader.Front();
    if (!front.ok()) return std::string(front.status().message());
    if (!front->has_value()) return "none";
    std::string message(**front);
    reader.Pop();
    return message;
  }

  const std::unique_ptr<SharedMemory> shared = *SharedMemory::Create();
  const PipeMemory memory = shared->ToServer();
  PipeWriter writer{memory};
  PipeReader reader{memory};
};

TEST_F(MessagePipeTest, KeepsMessagesApartAndInOrder) {
  EXPECT_EQ(Read(), "none");
  EXPECT_TRUE(*writer.Write({"a", "", "bc"}));
  EXPECT_TRUE(*writer.Write({}));
  EXPECT_TRUE(*writer.Write({"12345678"}));
  EXPECT_EQ(Read(), "abc");
  EXPECT_EQ(Read(), "");
  EXPECT_EQ(Read(), "12345678");
  EXPECT_EQ(Read(), "none");
}

TEST_F(MessagePipeTest, AMessageIsContiguousWhereverItBegins) {
  const size_t bytes = memory.capacity / 3;  // so that every third or fourth message passes the end
  for (int i = 0; i < 20; ++i) {
    std::string message(bytes + i, static_cast<char>('a' + i));
    message.back() = '!';
    EXPECT_TRUE(*writer.Write({message}));
    EXPECT_EQ(Read(), message) << i;
  }
}

TEST_F(MessagePipeTest, RefusesWhatHasNoRoomUntilTheReaderMakesSome) {
  const std::string half(memory.capacity / 2, 'x');
  EXPECT_TRUE(*writer.Write({half}));
  EXPECT_FALSE(*writer.Write({half}));
  EXPECT_TRUE(*writer.Write({"small"}));
  ASSERT_TRUE(reader.Front().ok());
  EXPECT_TRUE(reader.Pop());  // the writer waits
  EXPECT_TRUE(*writer.Write({half}));
  ASSERT_TRUE(reader.Front().ok());
  EXPECT_FALSE(reader.Pop());
  EXPECT_EQ(Read(), half);
}

TEST_F(MessagePipeTest, RefusesAMessageThatNeverFits) {
  EXPECT_EQ(writer.Write({std::string(memory.capacity, 'x')}).status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(*writer.Write({std::string(memory.capacity - 8, 'x')}));
  EXPECT_EQ(Read().size(), memory.capacity - 8);
}

TEST_F(MessagePipeTest, AHostileWriterGivesAnErrorAndNoAccessOutside) {
  for (const uint64_t written : {uint64_t{1}, uint64_t{7}, uint64_t{memory.capacity} + 8, ~uint64_t{0}}) {
    memory.positions->written.store(written);
    EXPECT_FALSE(reader.Front().ok()) << written;
  }
  for (const uint64_t size : {uint64_t{9}, uint64_t{memory.capacity}, ~uint64_t{0}, ~uint64_t{0} - 8}) {
    memory.positions->written.store(16);
    std::memcpy(memory.data, &size, sizeof(size));
    EXPECT_FALSE(reader.Front().ok()) << size;
  }
}

TEST_F(MessagePipeTest, AHostileReaderGivesAnErrorAndNoAccessOutside) {
  ASSERT_TRUE(*writer.Write({"a"}));
  for (const uint64_t read : {uint64_t{17}, ~uint64_t{0}}) {
    memory.positions->read.store(read);
    EXPECT_FALSE(writer.Write({"b"}).ok()) << read;
  }
  ASSERT_TRUE(*PipeWriter(shared->ToClient()).Write({std::string(memory.capacity - 8, 'x')}));
}

TEST_F(MessagePipeTest, CarriesMessagesBetweenThreads) {
  constexpr int kMessages = 20000;
  const auto message = [](int i) { return std::string(static_cast<size_t>(i) * 7919 % 5000, static_cast<char>(i)); };
  std::thread other([&] {
    for (int i = 0; i < kMessages;) i += *writer.Write({message(i)}) ? 1 : 0;
  });
  for (int i = 0; i < kMessages;) {
    const auto front = reader.Front();
    ASSERT_TRUE(front.ok()) << front.status();
    if (!front->has_value()) continue;
    ASSERT_THAT(*front, Optional(message(i))) << i;
    reader.Pop();
    ++i;
  }
  other.join();
}

}  // namespace
}  // namespace precondor::wire
