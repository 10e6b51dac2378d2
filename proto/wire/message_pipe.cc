// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/message_pipe.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

constexpr size_t kSizeBytes = 8;  // before each message, which is padded to a multiple of 8

uint64_t Padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

absl::Status Broken(uint64_t written, uint64_t read) {
  return absl::InternalError(absl::StrCat(
      "shared memory: expected at most the pipe's bytes between its positions, got ", read, " and ", written));
}

}  // namespace

absl::StatusOr<bool> PipeWriter::HasRoom(uint64_t bytes) const {
  const uint64_t read = memory_.positions->read.load(std::memory_order_acquire);
  if (read > written_ || written_ - read > memory_.capacity) return Broken(written_, read);
  return bytes <= memory_.capacity - (written_ - read);
}

absl::StatusOr<bool> PipeWriter::Write(absl::Span<const absl::string_view> parts) {
  uint64_t size = 0;
  for (const absl::string_view part : parts) size += part.size();
  const uint64_t needed = kSizeBytes + Padded(size);
  if (needed > memory_.capacity) {
    return absl::InternalError(absl::StrCat("shared memory: expected a message of at most ",
                                            memory_.capacity - kSizeBytes, " bytes, got ", size));
  }
  PRECONDOR_ASSIGN_OR_RETURN(bool room, HasRoom(needed));
  if (!room) {
    memory_.positions->waiting.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // as in Pop: one side sees the other
    PRECONDOR_ASSIGN_OR_RETURN(room, HasRoom(needed));
    if (!room) return false;
  }
  uint8_t* to = memory_.data + written_ % memory_.capacity;
  std::memcpy(to, &size, kSizeBytes);
  to += kSizeBytes;
  for (const absl::string_view part : parts) {
    if (!part.empty()) std::memcpy(to, part.data(), part.size());
    to += part.size();
  }
  written_ += needed;
  memory_.positions->written.store(written_, std::memory_order_release);
  return true;
}

absl::StatusOr<std::optional<absl::string_view>> PipeReader::Front() {
  const uint64_t written = memory_.positions->written.load(std::memory_order_acquire);
  if (written < read_ || written - read_ > memory_.capacity) return Broken(written, read_);
  const uint64_t there = written - read_;
  if (there == 0) return std::nullopt;
  uint8_t* const at = memory_.data + read_ % memory_.capacity;
  // Read once: the writer may change it. Messages begin at multiples of 8.
  const uint64_t size = std::atomic_ref(*reinterpret_cast<uint64_t*>(at)).load(std::memory_order_relaxed);
  if (there < kSizeBytes || size > there - kSizeBytes || kSizeBytes + Padded(size) > there) {
    return absl::InternalError(
        absl::StrCat("shared memory: expected a message within ", there, " bytes, got one of ", size));
  }
  front_ = kSizeBytes + Padded(size);
  return absl::string_view(reinterpret_cast<const char*>(at) + kSizeBytes, static_cast<size_t>(size));
}

bool PipeReader::Pop() {
  read_ += front_;
  front_ = 0;
  memory_.positions->read.store(read_, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  std::atomic<uint32_t>& waiting = memory_.positions->waiting;
  return waiting.load(std::memory_order_relaxed) != 0 && waiting.exchange(0, std::memory_order_relaxed) != 0;
}

}  // namespace precondor::wire
