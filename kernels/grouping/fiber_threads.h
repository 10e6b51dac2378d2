// SPDX-License-Identifier: Apache-2.0
// Threads that run a batch of fibers concurrently.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"

#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"

namespace precondor {

// A fixed set of threads that run fibers. Only one thread at a time may call Run.
class FiberThreads {
 public:
  // `threads` >= 1 is the number of threads, the caller of Run included.
  explicit FiberThreads(int threads);
  ~FiberThreads();
  FiberThreads(const FiberThreads&) = delete;
  FiberThreads& operator=(const FiberThreads&) = delete;

  // Calls Fiber::Run for each fiber, started in their order. Returns when each has suspended itself, ended or moved
  // away. A small batch runs on the caller's thread alone, which is faster than waking others.
  void Run(absl::Span<Fiber* const> fibers);

 private:
  void Loop();
  // Runs the fibers of the batch that no other thread has started.
  void RunSome(absl::Span<Fiber* const> fibers);

  std::atomic<size_t> next_ = 0;  // index of the next fiber of the batch

  Mutex mu_;
  CondVar begun_, ended_;
  absl::Span<Fiber* const> batch_ ABSL_GUARDED_BY(mu_);  // empty between batches
  uint64_t batches_ ABSL_GUARDED_BY(mu_) = 0;
  int at_work_ ABSL_GUARDED_BY(mu_) = 0;  // number of threads_ that work on the batch
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // all threads but the caller of Run
};

}  // namespace precondor
