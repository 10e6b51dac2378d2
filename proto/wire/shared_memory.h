// SPDX-License-Identifier: Apache-2.0
// Memory that a server and a client of one host share for the messages of one stream: a pipe in each direction, and a
// doorbell for each side (docs/develop/adr/0039-shared-memory.md).
//
// The server creates a memfd of a fixed, sealed size, and names it to the client by its path under /proc. The kernel
// lets processes open that path that may trace the server: in general those of the same user. A client cannot shrink
// the memory under the server.
//
// Processes of two versions share the layout. Another layout needs another RingKind.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace precondor::wire {

// A pipe is one direction of messages through the memory: one writer, one reader. Each side trusts nothing of what the
// other writes: a number that is out of range is an error, and never an access outside the pipe.

// The shared state of a pipe. Zero bytes are an empty pipe.
struct PipePositions {
  alignas(64) std::atomic<uint64_t> written;  // bytes that the writer has put in since the beginning
  alignas(64) std::atomic<uint64_t> read;     // bytes that the reader has taken out since the beginning
  alignas(64) std::atomic<uint32_t> waiting;  // 1 if the writer waits for room
};

// The bytes of a pipe: `capacity` bytes, mapped twice in a row at `data`, so that every message is contiguous.
struct PipeMemory {
  PipePositions* positions = nullptr;
  uint8_t* data = nullptr;
  size_t capacity = 0;  // a multiple of 8
};

// Not thread-safe.
class PipeWriter {
 public:
  // Lifetime: the memory outlives this object. The pipe must be empty and new.
  explicit PipeWriter(const PipeMemory& memory) : memory_(memory) {}

  // Appends one message, whose parts follow one another. Returns false, and writes nothing, if there is no room for it
  // yet: the reader's next Pop then returns true. Returns INTERNAL for a message that is larger than the pipe, and if
  // the reader has broken the positions.
  absl::StatusOr<bool> Write(absl::Span<const absl::string_view> parts);

 private:
  absl::StatusOr<bool> HasRoom(uint64_t bytes) const;

  const PipeMemory memory_;
  uint64_t written_ = 0;  // the own copy of positions->written
};

// Not thread-safe.
class PipeReader {
 public:
  // As PipeWriter.
  explicit PipeReader(const PipeMemory& memory) : memory_(memory) {}

  // Returns the first message, or nullopt if the pipe is empty. It is valid until Pop. A hostile writer can change its
  // bytes meanwhile: read each of them once. Returns INTERNAL if the writer has broken the positions or the size.
  absl::StatusOr<std::optional<absl::string_view>> Front();
  // Removes the message that Front has returned. Returns true if the writer waits for room.
  bool Pop();

 private:
  const PipeMemory memory_;
  uint64_t read_ = 0;   // the own copy of positions->read
  uint64_t front_ = 0;  // bytes of the first message with its size; 0 if Front has returned none
};

// By which one side wakes the other one's thread. In shared memory; zero bytes are a new doorbell. One thread waits:
// it calls `rings`, looks for work, and calls Wait if there is none.
class Doorbell {
 public:
  // Wakes the thread that waits, or makes its next Wait return. Costs a system call only if it waits. Thread-safe.
  void Ring();
  // Rings with a system call always: for the own thread, since a broken peer may have written that none waits.
  void RingAlways();
  uint32_t rings() const { return word_.load(std::memory_order_acquire) & ~kWaits; }
  // Waits unless Ring has been called since `rings` returned `seen`. Returns false after a second, since a broken peer
  // may have undone a ring.
  bool Wait(uint32_t seen);

 private:
  // One word for both, so that a ring cannot come between the announcement of a wait and the wait.
  static constexpr uint32_t kWaits = 1;  // a thread waits, or is about to
  static constexpr uint32_t kRing = 2;   // added by each ring

  alignas(64) std::atomic<uint32_t> word_;
};

// Returns bytes that are equal in two processes of one boot of one host, PID namespace and user: one can then, as a
// rule, open the other's memory by its path. Empty if this process cannot tell.
const std::string& HostIdentity();

// The mapped memory. Thread-safe as its parts are.
class SharedMemory {
 public:
  static constexpr size_t kBytes = size_t{8} << 20;
  static constexpr size_t kPipeBytes = (size_t{4} << 20) - (size_t{32} << 10);  // holds the largest message of a stream

  // Create memory, or map the memory that a peer has created. `handle` is that of the peer's SharedMemory. Return
  // UNAVAILABLE with the reason.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Create();
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Open(absl::string_view handle);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const std::string& handle() const { return handle_; }
  // Closes the descriptor by which a peer opens the memory.
  void CloseDescriptor();

  PipeMemory ToServer() const;
  PipeMemory ToClient() const;
  Doorbell& server_doorbell() const;
  Doorbell& client_doorbell() const;

 private:
  struct Layout;
  SharedMemory() = default;
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Map(int descriptor);
  Layout& layout() const;

  uint8_t* base_ = nullptr;
  int descriptor_ = -1;  // the creator's
  std::string handle_;
};

}  // namespace precondor::wire
