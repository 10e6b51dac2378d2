// SPDX-License-Identifier: Apache-2.0
// memfd_create in place of glibc's. With TEST_WITHOUT_MEMFD, servers in this process share no memory with their
// clients, and both use gRPC.
#include <cerrno>
#include <cstdlib>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" int memfd_create(const char* name, unsigned flags) noexcept {
  if (getenv("TEST_WITHOUT_MEMFD") == nullptr) return static_cast<int>(syscall(SYS_memfd_create, name, flags));
  errno = ENOSYS;
  return -1;
}
