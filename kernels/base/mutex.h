// SPDX-License-Identifier: Apache-2.0
// std::mutex with Clang's thread-safety annotations, and names of threads. Not absl::Mutex: see docs/develop/gotchas.md
// (deadlock detector, TSan).
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <pthread.h>

#include "absl/base/thread_annotations.h"

#include "kernels/base/check.h"

namespace precondor {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mu_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mu_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

// std::condition_variable for Mutex. Not std::condition_variable_any: that one has a second mutex, which a waiter that
// wakes up contends for with its notifier. The waits' caller holds `mu`.
class CondVar {
 public:
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

  void wait(Mutex& mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Held held(mu);
    changed_.wait(held.lock);
  }
  template <typename Predicate>
  void wait(Mutex& mu, Predicate predicate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Held held(mu);
    changed_.wait(held.lock, predicate);
  }
  // Return false if the time passes first.
  template <typename Time>
  bool wait_until(Mutex& mu, const Time& deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Held held(mu);
    return changed_.wait_until(held.lock, deadline) == std::cv_status::no_timeout;
  }
  // Return the predicate's last value.
  template <typename Time, typename Predicate>
  bool wait_until(Mutex& mu, const Time& deadline, Predicate predicate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Held held(mu);
    return changed_.wait_until(held.lock, deadline, predicate);
  }
  template <typename Duration, typename... Predicate>
  bool wait_for(Mutex& mu, const Duration& timeout, Predicate... predicate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return wait_until(mu, std::chrono::steady_clock::now() + timeout, predicate...);
  }

 private:
  // The lock of a Mutex that the caller holds and keeps.
  struct Held {
    explicit Held(Mutex& mu) : lock(mu.mu_, std::adopt_lock) {}
    ~Held() { lock.release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    std::unique_lock<std::mutex> lock;
  };

  std::condition_variable changed_;
};

// Names the calling thread for top -H, perf and debuggers. Precondition: `name` has at most 15 characters, which is
// what Linux takes.
inline void NameThisThread(const char* name) { PRECONDOR_CHECK(pthread_setname_np(pthread_self(), name) == 0); }

}  // namespace precondor
