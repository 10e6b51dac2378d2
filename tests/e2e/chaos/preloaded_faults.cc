// SPDX-License-Identifier: Apache-2.0
// Preloaded into a server, gives it a disk that fails and a clock that is set, as the two numbers say that are in the
// file of the environment variable FAULTS_FILE: whether writes fail with EIO, and nanoseconds to add to the time of
// day. mixed_test.py writes them at any time.
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

constexpr int64_t kSecond = 1'000'000'000;

struct Faults {
  std::atomic<int64_t> disk_fails;
  std::atomic<int64_t> clock_offset;
};

const Faults& Current() {
  static const Faults* const faults = [] {
    static const Faults none = {};
    const char* const path = std::getenv("FAULTS_FILE");
    const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void* const mapped = fd < 0 ? MAP_FAILED : mmap(nullptr, sizeof(Faults), PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    return mapped == MAP_FAILED ? &none : static_cast<const Faults*>(mapped);
  }();
  return *faults;
}

template <typename Function>
Function* Real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Standard output and error stay whole.
bool DiskFails(int fd) {
  struct stat info;
  if (Current().disk_fails == 0 || fd <= STDERR_FILENO || fstat(fd, &info) != 0) return false;
  errno = EIO;
  return S_ISREG(info.st_mode) || S_ISDIR(info.st_mode);
}

timespec Plus(const timespec& time, int64_t nanoseconds) {
  const int64_t sum = time.tv_sec * kSecond + time.tv_nsec + nanoseconds;
  return {.tv_sec = sum / kSecond, .tv_nsec = sum % kSecond};
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* bytes, size_t count) {
  static const auto real = Real<decltype(write)>("write");
  return DiskFails(fd) ? -1 : real(fd, bytes, count);
}

ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  static const auto real = Real<decltype(pwrite)>("pwrite");
  return DiskFails(fd) ? -1 : real(fd, bytes, count, offset);
}

ssize_t writev(int fd, const iovec* pieces, int count) {
  static const auto real = Real<decltype(writev)>("writev");
  return DiskFails(fd) ? -1 : real(fd, pieces, count);
}

int fdatasync(int fd) {
  static const auto real = Real<decltype(fdatasync)>("fdatasync");
  return DiskFails(fd) ? -1 : real(fd);
}

int fsync(int fd) {
  static const auto real = Real<decltype(fsync)>("fsync");
  return DiskFails(fd) ? -1 : real(fd);
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  static const auto real = Real<int(clockid_t, timespec*)>("clock_gettime");
  const int result = real(clock, time);
  if (result == 0 && clock == CLOCK_REALTIME) *time = Plus(*time, Current().clock_offset);
  return result;
}

int gettimeofday(timeval* time, void*) noexcept {
  timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* result) noexcept {
  timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  if (result != nullptr) *result = now.tv_sec;
  return now.tv_sec;
}

// The kernel compares deadlines with its own clock. Abseil waits by this call.
long syscall(long number, ...) noexcept {
  static const auto real = Real<long(long, ...)>("syscall");
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  timespec until;
  if (number == SYS_futex && (arguments[1] & FUTEX_CLOCK_REALTIME) != 0 && arguments[3] != 0) {
    until = Plus(*reinterpret_cast<const timespec*>(arguments[3]), -Current().clock_offset);
    arguments[3] = reinterpret_cast<long>(&until);
  }
  return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}
}
