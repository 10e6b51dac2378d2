// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/fiber.h"

#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "kernels/base/check.h"
#include "kernels/base/sanitizers.h"
#if PRECONDOR_HAS_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if PRECONDOR_HAS_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace precondor {
namespace {

// The kernel provides pages when they are touched. A strand's task may end in calls of gRPC and of the journal, which
// need as much stack as on a small thread.
constexpr size_t kStackBytes = size_t{1} << 20;

// AddressSanitizer must be told of each change of stack. It stores the fake stack of the stack that is left in
// `fake_stack`.
#if PRECONDOR_HAS_ASAN
void BeginSwitch(void** fake_stack, const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
}
void EndSwitch(void* fake_stack, const void** stack, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
}
void CleanStack(void* stack) { ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes); }
#else
void BeginSwitch(void**, const void*, size_t) {}
void EndSwitch(void*, const void**, size_t*) {}
void CleanStack(void*) {}
#endif

#define PRECONDOR_SWITCHES_STACKS __attribute__((noinline, no_sanitize("address"), no_sanitize("thread")))
// ThreadSanitizer records in its context where functions begin and end. So no function may begin in one context and end
// in another.
#define PRECONDOR_INLINE __attribute__((always_inline)) inline

// ThreadSanitizer keeps a context for each fiber and each thread.
#if PRECONDOR_HAS_TSAN
void* NewContext() { return __tsan_create_fiber(0); }
void* ThreadContext() { return __tsan_get_current_fiber(); }
void FreeContext(void* context) { __tsan_destroy_fiber(context); }
PRECONDOR_INLINE void SwitchContext(void* context) { __tsan_switch_to_fiber(context, 0); }
#else
void* NewContext() { return nullptr; }
void* ThreadContext() { return nullptr; }
void FreeContext(void*) {}
void SwitchContext(void*) {}
#endif

}  // namespace

// The point at which a suspended stack continues. On x86-64 the registers that a call preserves are saved on the stack
// itself, and a switch makes no system call. Other processors use the C library's switch, which makes a system call to
// save and restore the signal mask.
#if defined(__x86_64__)
extern "C" void precondor_switch_stack(void** from, void* to);
asm(R"(
.pushsection .text
.type precondor_switch_stack, @function
precondor_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size precondor_switch_stack, . - precondor_switch_stack
.popsection
)");

struct StackPoint {
  void* top = nullptr;

  // Prepares the point so that the first switch to it calls `function`, which must not return.
  bool Begin(char* stack, size_t bytes, void (*function)()) {
    constexpr size_t kSaved = 6;
    auto* const words = reinterpret_cast<void**>(stack + bytes);  // page-aligned
    words[-1] = nullptr;                                          // return address of `function`
    words[-2] = reinterpret_cast<void*>(function);
    for (size_t i = 0; i < kSaved; ++i) words[-3 - static_cast<std::ptrdiff_t>(i)] = nullptr;
    top = words - 2 - kSaved;
    return true;
  }
  PRECONDOR_INLINE static void Switch(StackPoint& from, const StackPoint& to) {
    precondor_switch_stack(&from.top, to.top);
  }
};
#else
struct StackPoint {
  ucontext_t context;

  bool Begin(char* stack, size_t bytes, void (*function)()) {
    if (getcontext(&context) != 0) return false;
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, function, 0);
    return true;
  }
  PRECONDOR_INLINE static void Switch(StackPoint& from, const StackPoint& to) {
    swapcontext(&from.context, &to.context);
  }
};
#endif

// State of a thread that runs fibers.
struct Fiber::Thread {
  StackPoint point;
  Fiber* current = nullptr;
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* context = nullptr;
};

struct Fiber::Stack {
  StackPoint point;
  void* memory = nullptr;
  size_t guard_bytes = 0;
  void* fake_stack = nullptr;
  void* context = nullptr;

  char* begin() const { return static_cast<char*>(memory) + guard_bytes; }
};

// The asm statement keeps compilers from assuming that the function's result never changes: a fiber may call it on one
// thread and then on another.
__attribute__((noinline)) Fiber::Thread& Fiber::ThisThread() {
  asm volatile("");
  thread_local Thread thread;
  return thread;
}

__attribute__((noinline)) Fiber* Fiber::Current() { return ThisThread().current; }

Fiber::Fiber(FiberScheduler& home) : home_(home), stack_(std::make_unique<Stack>()) {}

std::unique_ptr<Fiber> Fiber::Make(FiberScheduler& home) {
  std::unique_ptr<Fiber> fiber(new Fiber(home));
  Stack& stack = *fiber->stack_;
  const auto guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  stack.memory = memory;
  stack.guard_bytes = guard;
  // The stack grows down towards a guard page, which nothing may touch.
  if (mprotect(memory, guard, PROT_NONE) != 0) return nullptr;
  if (!stack.point.Begin(stack.begin(), kStackBytes, &Fiber::Main)) return nullptr;
  stack.context = NewContext();
  return fiber;
}

Fiber::~Fiber() {
  PRECONDOR_CHECK(ended_);
  if (stack_->context != nullptr) FreeContext(stack_->context);
  if (stack_->memory == nullptr) return;
  CleanStack(stack_->begin());  // for the next mapping at this address
  munmap(stack_->memory, stack_->guard_bytes + kStackBytes);
}

void Fiber::Set(std::function<void()> function, uint64_t order) {
  PRECONDOR_CHECK(ended_);
  function_ = std::move(function);
  order_ = order;
  at_ = &home_;
  ended_ = false;
}

Fiber::Outcome Fiber::Run() {
  Thread& thread = ThisThread();
  PRECONDOR_CHECK(thread.current == nullptr && !ended_);
  thread.current = this;
  thread_ = &thread;
  Enter(thread);
  thread.current = nullptr;
  if (ended_) return Outcome::kEnded;
  FiberScheduler* const next = std::exchange(next_, nullptr);
  if (next == nullptr) return Outcome::kSuspended;
  next->Resume(*this);
  return Outcome::kTaken;
}

PRECONDOR_SWITCHES_STACKS void Fiber::Enter(Thread& thread) {
  Stack& stack = *stack_;
  thread.context = ThreadContext();
  BeginSwitch(&thread.fake_stack, stack.begin(), kStackBytes);
  SwitchContext(stack.context);
  StackPoint::Switch(thread.point, stack.point);
  EndSwitch(thread.fake_stack, nullptr, nullptr);
}

PRECONDOR_SWITCHES_STACKS void Fiber::Leave() {
  Stack& stack = *stack_;
  BeginSwitch(&stack.fake_stack, thread_->stack, thread_->stack_bytes);
  SwitchContext(thread_->context);
  StackPoint::Switch(stack.point, thread_->point);
  // thread_ is now the thread that has called Run, which may be another one.
  EndSwitch(stack.fake_stack, &thread_->stack, &thread_->stack_bytes);
}

// One stack runs one function after another.
void Fiber::Main() {
  Fiber& fiber = *Current();
  EndSwitch(nullptr, &fiber.thread_->stack, &fiber.thread_->stack_bytes);
  for (;;) {
    fiber.function_();
    fiber.function_ = nullptr;
    fiber.ended_ = true;
    fiber.Leave();
  }
}

void Fiber::Suspend() { Current()->Leave(); }

void Fiber::MoveTo(FiberScheduler& scheduler) {
  Fiber& fiber = *Current();
  fiber.at_ = fiber.next_ = &scheduler;
  fiber.Leave();
}

void Fiber::Return() { MoveTo(Current()->home_); }

void RunBlocking(absl::FunctionRef<void()> work) {
  const Fiber* const fiber = Fiber::Current();
  if (fiber == nullptr || fiber->at_home()) return work();
  FiberScheduler& scheduler = fiber->at();
  Fiber::Return();
  work();
  Fiber::MoveTo(scheduler);
}

}  // namespace precondor
