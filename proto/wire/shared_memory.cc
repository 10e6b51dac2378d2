// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/shared_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <fstream>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

constexpr size_t kSizeBytes = 8;  // before each message, which is padded to a multiple of 8

uint64_t Padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

absl::Status Broken(uint64_t written, uint64_t read) {
  return absl::InternalError(absl::StrCat(
      "shared memory: expected at most the pipe's bytes between its positions, got ", read, " and ", written));
}

constexpr size_t kTokenBytes = 16;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

absl::Status Unavailable(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("shared memory: ", what, ": ", std::strerror(errno)));
}

// Closes a file descriptor at the end of a scope.
struct OpenFile {
  ~OpenFile() {
    if (number >= 0) close(number);
  }
  int number;
};

std::string ReadHostIdentity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char processes[64];
  const ssize_t size = readlink("/proc/self/ns/pid", processes, sizeof(processes));
  if (boot.empty() || size <= 0) return "";
  return absl::StrCat(boot, " ", absl::string_view(processes, static_cast<size_t>(size)), " ", geteuid());
}

// Creates a memfd that no process can execute. Kernels before 6.3 have no such flag, and some later ones insist on it.
int CreateFile() {
  constexpr char kName[] = "precondor-stream";
  const int file = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  return file >= 0 || errno != EINVAL ? file : memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

// Whether the file has the size and the seals of a peer's memory, so that it cannot shrink.
bool IsMemory(int file) {
  struct stat facts = {};
  if (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode)) return false;
  const int seals = fcntl(file, F_GET_SEALS);
  return facts.st_size == static_cast<off_t>(SharedMemory::kBytes) && seals >= 0 && (seals & kSeals) == kSeals;
}

// Whether `path` is /proc/NUMBER/fd/NUMBER: a peer must not choose another file to open.
bool IsDescriptor(absl::string_view path) {
  const std::vector<absl::string_view> parts = absl::StrSplit(path, '/');
  const auto is_number = [](absl::string_view text) {
    return !text.empty() && text.size() < 12 && std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
  };
  return parts.size() == 5 && parts[0].empty() && parts[1] == "proc" && is_number(parts[2]) && parts[3] == "fd" &&
         is_number(parts[4]);
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

// --- Doorbell -----------------------------------------------------------------------------------------------------

void Doorbell::Ring() {
  uint32_t old = word_.load(std::memory_order_relaxed);
  while (!word_.compare_exchange_weak(old, (old + kRing) & ~kWaits, std::memory_order_seq_cst)) {
  }
  if ((old & kWaits) != 0) syscall(SYS_futex, &word_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void Doorbell::RingAlways() {
  Ring();
  syscall(SYS_futex, &word_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

bool Doorbell::Wait(uint32_t seen) {
  uint32_t waiting = seen;
  if (!word_.compare_exchange_strong(waiting, seen | kWaits, std::memory_order_seq_cst)) return true;
  waiting = seen | kWaits;
  const timespec second = {.tv_sec = 1, .tv_nsec = 0};
  const bool timed_out =
      syscall(SYS_futex, &word_, FUTEX_WAIT, waiting, &second, nullptr, 0) != 0 && errno == ETIMEDOUT;
  word_.compare_exchange_strong(waiting, seen, std::memory_order_relaxed);  // fails if it has been rung
  return !timed_out;
}

// --- SharedMemory -------------------------------------------------------------------------------------------------

const std::string& HostIdentity() {
  static const auto* const kIdentity = new std::string(ReadHostIdentity());
  return *kIdentity;
}

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(PipePositions) == 192 && sizeof(Doorbell) == 64);

struct SharedMemory::Layout {
  char token[kTokenBytes];  // shows a client that it has opened the right file
  PipePositions to_server;
  PipePositions to_client;
  Doorbell server;
  Doorbell client;
};

// The file has the layout, padded, and the two pipes. In the address space each pipe's bytes follow twice in a row.
constexpr size_t kLayoutBytes = SharedMemory::kBytes - 2 * SharedMemory::kPipeBytes;
constexpr size_t kMappedBytes = kLayoutBytes + 4 * SharedMemory::kPipeBytes;

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int descriptor) {
  static_assert(sizeof(Layout) <= kLayoutBytes);
  void* const base = mmap(nullptr, kMappedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return Unavailable("mmap");
  std::unique_ptr<SharedMemory> memory(new SharedMemory);
  memory->base_ = static_cast<uint8_t*>(base);
  const auto map = [&](size_t at, size_t offset, size_t bytes) {
    return mmap(memory->base_ + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor,
                static_cast<off_t>(offset)) != MAP_FAILED;
  };
  bool mapped = map(0, 0, kLayoutBytes);
  for (size_t i = 0; i < 4; ++i) {
    mapped = mapped && map(kLayoutBytes + i * kPipeBytes, kLayoutBytes + i / 2 * kPipeBytes, kPipeBytes);
  }
  if (!mapped) return Unavailable("mmap");
  // A forked process, as a loader of data is, would keep the memory for as long as it runs.
  madvise(base, kMappedBytes, MADV_DONTFORK);
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create() {
  if (HostIdentity().empty()) return absl::UnavailableError("shared memory: /proc does not identify this process");
  OpenFile file = {CreateFile()};
  if (file.number < 0) return Unavailable("memfd_create");
  if (ftruncate(file.number, static_cast<off_t>(kBytes)) != 0) return Unavailable("ftruncate");
  if (fcntl(file.number, F_ADD_SEALS, kSeals) != 0) return Unavailable("F_ADD_SEALS");
  if (!IsMemory(file.number)) return absl::UnavailableError("shared memory: another process has changed the size");
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> memory, Map(file.number));
  Layout& layout = memory->layout();
  if (getentropy(layout.token, kTokenBytes) != 0) return Unavailable("getentropy");
  memory->handle_ = absl::StrCat(absl::string_view(layout.token, kTokenBytes), "/proc/", getpid(), "/fd/", file.number);
  memory->descriptor_ = std::exchange(file.number, -1);
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Open(absl::string_view handle) {
  if (handle.size() < kTokenBytes || !IsDescriptor(handle.substr(kTokenBytes))) {
    return absl::UnavailableError("shared memory: expected a token and /proc/PID/fd/NUMBER");
  }
  const std::string path(handle.substr(kTokenBytes));
  // Another process may have the number by now, and another file, which an open could change: look at it first.
  const OpenFile place = {open(path.c_str(), O_PATH | O_CLOEXEC)};
  if (place.number < 0) return Unavailable(path);
  struct stat facts = {};
  if (fstat(place.number, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    return absl::UnavailableError(absl::StrCat("shared memory: ", path, " is not the peer's memory"));
  }
  const OpenFile file = {open(absl::StrCat("/proc/self/fd/", place.number).c_str(), O_RDWR | O_CLOEXEC)};
  if (file.number < 0) return Unavailable(path);
  if (!IsMemory(file.number)) {
    return absl::UnavailableError(absl::StrCat("shared memory: ", path, " is not the peer's memory"));
  }
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> memory, Map(file.number));
  if (std::memcmp(memory->layout().token, handle.data(), kTokenBytes) != 0) {
    return absl::UnavailableError(absl::StrCat("shared memory: ", path, " is not the peer's memory"));
  }
  return memory;
}

SharedMemory::~SharedMemory() {
  munmap(base_, kMappedBytes);
  CloseDescriptor();
}

void SharedMemory::CloseDescriptor() {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

SharedMemory::Layout& SharedMemory::layout() const { return *reinterpret_cast<Layout*>(base_); }

PipeMemory SharedMemory::ToServer() const { return {&layout().to_server, base_ + kLayoutBytes, kPipeBytes}; }
PipeMemory SharedMemory::ToClient() const {
  return {&layout().to_client, base_ + kLayoutBytes + 2 * kPipeBytes, kPipeBytes};
}
Doorbell& SharedMemory::server_doorbell() const { return layout().server; }
Doorbell& SharedMemory::client_doorbell() const { return layout().client; }

}  // namespace precondor::wire
