// SPDX-License-Identifier: Apache-2.0
// Functions that can stop in the middle and go on later, on the same thread or on another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"

namespace precondor {

class Fiber;

// Takes suspended fibers and resumes them on a thread of its own.
class FiberScheduler {
 public:
  virtual ~FiberScheduler() = default;
  // `fiber` is suspended and nothing else resumes it. Called on the thread that the fiber has left. Thread-safe.
  virtual void Resume(Fiber& fiber) = 0;
};

// A stack and the function that runs on it. The owner starts the function with Run, and calls Run again for each time
// that the function has suspended itself. A function that suspends itself must hold no lock: another thread may
// continue it, and a mutex must be released by the thread that took it. For the same reason it must not keep the
// address of a thread_local variable over a suspension.
//
// Sanitizers are told of each change of stack. Threads: one at a time runs a fiber; the owner orders them.
class Fiber {
 public:
  // A fiber has ended its function, or it waits for the next Run, or a scheduler has taken it. In the last
  // case it may be running on another thread already.
  enum class Outcome { kEnded, kSuspended, kTaken };

  // Null where the system has no memory for a stack. `home` resumes the fiber where it was started (see Return).
  static std::unique_ptr<Fiber> Make(FiberScheduler& home);
  // Precondition: the fiber's function has ended, or none was given.
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The fiber that calls; null on a thread's own stack.
  static Fiber* Current();

  // --- for the owner ------------------------------------------------------------------------------------------
  // The function that the next Run begins. `order` is for schedulers that sort fibers. Precondition: as ~Fiber's.
  void Set(std::function<void()> function, uint64_t order);
  uint64_t order() const { return order_; }
  // Begins or continues the function. Not on a fiber.
  Outcome Run();

  // --- for the function, on the current fiber -------------------------------------------------------------------
  // Returns when the owner calls Run again.
  static void Suspend();
  // Returns on a thread of `scheduler`.
  static void MoveTo(FiberScheduler& scheduler);
  // Returns on a thread of the fiber's home.
  static void Return();
  // The scheduler that the fiber has moved to last; its home before.
  FiberScheduler& at() const { return *at_; }
  bool at_home() const { return at_ == &home_; }
  // What the current fiber keeps for one user, who sets it.
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
  FiberScheduler* at_ = nullptr;    // whose thread runs it
  FiberScheduler* next_ = nullptr;  // that takes it when it has left the thread
  std::shared_ptr<void> local_;
  Thread* thread_ = nullptr;  // that runs it
  std::unique_ptr<Stack> stack_;
};

// Calls `work`, which waits for other threads: on a fiber at its home, so that the scheduler which runs it goes on with
// others meanwhile, and then returns to that scheduler. Elsewhere it only calls `work`.
void RunAtHome(absl::FunctionRef<void()> work);

}  // namespace precondor
