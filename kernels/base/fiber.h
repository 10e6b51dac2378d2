// SPDX-License-Identifier: Apache-2.0
// Fibers: functions that can suspend themselves and continue later, on the same thread or on another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"

namespace precondor {

class Fiber;

// Resumes suspended fibers on its own threads.
class FiberScheduler {
 public:
  virtual ~FiberScheduler() = default;
  // Takes `fiber` over. Precondition: `fiber` is suspended and no other code resumes it. Called on the thread that the
  // fiber has left. Thread-safe.
  virtual void Resume(Fiber& fiber) = 0;
};

// A stack and the function that runs on it. The owner starts the function with Run, and calls Run again after each
// Suspend. A function that suspends itself must hold no lock: another thread may continue it, and a mutex must be
// released by the thread that took it. For the same reason it must not keep the address of a thread_local variable
// across a suspension.
//
// Sanitizers are informed of each change of stack. Threads: one thread at a time runs a fiber; the owner ensures this.
class Fiber {
 public:
  // Why Run returned: the function has ended, the function waits for the next Run, or a scheduler has taken the fiber.
  // In the last case the fiber may already be running on another thread.
  enum class Outcome { kEnded, kSuspended, kTaken };

  // Returns null if the system has no memory for a stack. `home` is the scheduler that resumes the fiber where it was
  // started (see Return).
  static std::unique_ptr<Fiber> Make(FiberScheduler& home);
  // Precondition: the fiber's function has ended, or the fiber has never been given one.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Returns the fiber that the caller runs on, or null if the caller runs on a thread's own stack.
  static Fiber* Current();

  // --- For the owner --------------------------------------------------------------------------------------------
  // Sets the function that the next Run starts. `order` is a key for schedulers that sort fibers. Precondition: that of
  // ~Fiber.
  void Set(std::function<void()> function, uint64_t order);
  uint64_t order() const { return order_; }
  // Starts or continues the function. Precondition: the caller is not on a fiber.
  Outcome Run();

  // --- For the function, on the current fiber ---------------------------------------------------------------------
  // Suspends the current fiber until the owner calls Run again.
  static void Suspend();
  // Moves the current fiber to a thread of `scheduler`, on which this call returns.
  static void MoveTo(FiberScheduler& scheduler);
  // Moves the current fiber to a thread of its home, on which this call returns.
  static void Return();
  // Returns the scheduler that the fiber has moved to last, or its home if it has not moved.
  FiberScheduler& at() const { return *at_; }
  bool at_home() const { return at_ == &home_; }
  // Per-fiber storage for one user, like a thread_local. Null until that user sets it.
  std::shared_ptr<void>& local() { return local_; }

 private:
  struct Thread;
  struct Stack;

  explicit Fiber(FiberScheduler& home);
  static Thread& ThisThread();
  static void Main();
  void Enter(Thread& thread);
  void Leave();

  FiberScheduler& home_;
  uint64_t order_ = 0;
  std::function<void()> function_;
  bool ended_ = true;
  FiberScheduler* at_ = nullptr;    // scheduler whose thread runs the fiber
  FiberScheduler* next_ = nullptr;  // scheduler that takes the fiber once it has left the thread; may be null
  std::shared_ptr<void> local_;
  Thread* thread_ = nullptr;  // thread that runs the fiber
  std::unique_ptr<Stack> stack_;
};

// Calls `work`, which waits for other threads. On a fiber, `work` runs at the fiber's home, so that the scheduler that
// ran the fiber can run others meanwhile; the fiber then returns to that scheduler. Elsewhere it only calls `work`.
void RunBlocking(absl::FunctionRef<void()> work);

}  // namespace precondor
