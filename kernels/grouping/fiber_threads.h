// SPDX-License-Identifier: Apache-2.0
// Threads that run a batch of fibers side by side.
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

// Run is for one thread at a time.
class FiberThreads {
 public:
  // So many threads, the one that calls Run included; 1 or more.
  explicit FiberThreads(int threads);
  ~FiberThreads();
  FiberThreads(const FiberThreads&) = delete;
  FiberThreads& operator=(const FiberThreads&) = delete;

  // Fiber::Run of each, begun in their order. Returns when each has suspended itself, ended or left. Few fibers run on
  // the caller's thread alone, which is faster than waking others.
  void Run(absl::Span<Fiber* const> fibers);

 private:
  void Loop();
  // Those of the batch that no other thread has begun.
  void RunSome(absl::Span<Fiber* const> fibers);

  std::atomic<size_t> next_ = 0;  // of the batch

  Mutex mu_;
  CondVar begun_, ended_;
  absl::Span<Fiber* const> batch_ ABSL_GUARDED_BY(mu_);  // empty between batches
  uint64_t batches_ ABSL_GUARDED_BY(mu_) = 0;
  int at_work_ ABSL_GUARDED_BY(mu_) = 0;  // threads_ on the batch
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;  // all but the caller's
};

}  // namespace precondor
