// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/shared_memory.h"

#include <algorithm>
#include <cerrno>
#include <climits>
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

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace precondor::wire {
namespace {

constexpr size_t kTokenBytes = 16;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

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

}  // namespace

// --- Doorbell -----------------------------------------------------------------------------------------------------

// Ring and Wait both write first and then read what the other one writes, in sequentially consistent order: at least one
// of them sees the other.
void Doorbell::Ring() {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  if (waits_.load(std::memory_order_seq_cst) == 0) return;
  waits_.store(0, std::memory_order_relaxed);
  syscall(SYS_futex, &rings_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void Doorbell::RingAlways() {
  waits_.store(1, std::memory_order_seq_cst);
  Ring();
}

void Doorbell::Wait(uint32_t seen) {
  waits_.store(1, std::memory_order_seq_cst);
  const timespec second = {.tv_sec = 1, .tv_nsec = 0};
  syscall(SYS_futex, &rings_, FUTEX_WAIT, seen, &second, nullptr, 0);
  waits_.store(0, std::memory_order_relaxed);
}

// --- SharedMemory -------------------------------------------------------------------------------------------------

const std::string& HostIdentity() {
  static const auto* const identity = new std::string(ReadHostIdentity());
  return *identity;
}

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
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create() {
  if (HostIdentity().empty()) return absl::UnavailableError("shared memory: /proc does not identify this process");
  OpenFile file = {memfd_create("precondor-stream", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (file.number < 0) return Unavailable("memfd_create");
  if (ftruncate(file.number, static_cast<off_t>(kBytes)) != 0) return Unavailable("ftruncate");
  if (fcntl(file.number, F_ADD_SEALS, kSeals) != 0) return Unavailable("F_ADD_SEALS");
  PRECONDOR_ASSIGN_OR_RETURN(std::unique_ptr<SharedMemory> memory, Map(file.number));
  Layout& layout = memory->layout();
  if (getentropy(layout.token, kTokenBytes) != 0) return Unavailable("getentropy");
  memory->handle_ = absl::StrCat(absl::string_view(layout.token, kTokenBytes), "/proc/", getpid(), "/fd/", file.number);
  memory->descriptor_ = std::exchange(file.number, -1);
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Open(absl::string_view handle) {
  if (handle.size() > PATH_MAX || !absl::StartsWith(handle.substr(std::min(handle.size(), kTokenBytes)), "/proc/")) {
    return absl::UnavailableError("shared memory: expected a token and a path under /proc");
  }
  const std::string path(handle.substr(kTokenBytes));
  const OpenFile file = {open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK)};
  if (file.number < 0) return Unavailable(path);
  // Another process may have the number by now, and another file.
  struct stat facts = {};
  if (fstat(file.number, &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size != static_cast<off_t>(kBytes) ||
      fcntl(file.number, F_GET_SEALS) != kSeals) {
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
