// SPDX-License-Identifier: Apache-2.0
// The threads that run a device's tasks. Each task runs on its fiber until it waits for the device; several tasks run
// concurrently. When all tasks wait, one of the threads runs the operations of all of them, as one round.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

#include "kernels/base/fiber.h"
#include "kernels/base/mutex.h"
#include "kernels/grouping/deferred_task.h"

namespace precondor {

// A fixed set of threads that run a batch of fibers concurrently. Only one thread at a time may call Run.
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

// Fibers arrive by Resume, start in the order of Fiber::order, and leave for their home. Fibers that arrive while
// others run, or during a round, take part in the next round. A round waits for fibers that are expected, up to
// `patience`. So the rounds depend only on which fibers arrive together. Thread-safe.
class DeviceDriver final : public FiberScheduler {
 public:
  // Runs the deferred operations of tasks, in their order, and sets each task's status.
  using Round = std::function<void(absl::Span<DeferredTask* const> tasks)>;

  struct Options {
    int threads = 1;             // that run fibers; one of them runs the rounds
    size_t fibers_at_start = 1;  // to begin with while the driver has none: 1, except in tests that count rounds
    absl::Duration patience;     // longest wait of a round for expected fibers
    size_t most_fibers = 0;      // while so many wait, none is expected
  };

  DeviceDriver(Round round, const Options& options);
  // Precondition: every fiber has left.
  ~DeviceDriver() override;

  void Resume(Fiber& fiber) override;
  // Adds `change` to the number of fibers that are expected: they will arrive soon, or are there and have not told.
  void Expect(int64_t change);
  // Returns whether the caller is a fiber that runs on one of the driver's threads.
  bool RunsCaller() const;
  // Suspends the calling fiber until a round has run its task's operations. Precondition: RunsCaller.
  void Await(DeferredTask& task);

 private:
  struct Waiting {
    Fiber* fiber;
    DeferredTask* task;
  };

  void Loop();
  // Returns the fibers that have arrived, sorted. If no task waits for a round, first waits for fibers; an empty result
  // then means that the driver must stop. If tasks wait and no fiber has arrived, first waits for expected fibers.
  std::vector<Fiber*> TakeArrived();
  void RunRound(std::vector<Waiting> round);

  const Round round_;
  const Options options_;
  FiberThreads runs_fibers_;

  Mutex mu_;
  std::vector<Waiting> waiting_ ABSL_GUARDED_BY(mu_);
  CondVar arrived_changed_;
  std::vector<Fiber*> arrived_ ABSL_GUARDED_BY(mu_);
  int64_t expected_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<absl::Time> patient_until_ ABSL_GUARDED_BY(mu_);  // set while the next round waits
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace precondor
