// SPDX-License-Identifier: Apache-2.0
// One direction of messages through memory that two processes share: one writer, one reader. Each side trusts nothing
// of what the other writes: a number that is out of range is an error, and never an access outside the pipe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace precondor::wire {

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

}  // namespace precondor::wire
