// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cuda_host/grid.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <sys/mman.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/base/sanitizers.h"
#if PRECONDOR_HAS_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace precondor::cuda_host {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kStackBytes = size_t{64} << 10;
constexpr unsigned kLanes = 32;

// AddressSanitizer must be told of each change of stack. `fake_stack` is where it keeps that of the one left.
#if PRECONDOR_HAS_ASAN
void BeginSwitch(void** fake_stack, const void* stack, size_t bytes) {
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
}
void EndSwitch(void* fake_stack, const void** stack, size_t* bytes) {
  __sanitizer_finish_switch_fiber(fake_stack, stack, bytes);
}
// Removes what the thread that ran on it before had marked.
void CleanStack(void* stack) { ASAN_UNPOISON_MEMORY_REGION(stack, kStackBytes); }
#define PRECONDOR_SWITCHES_STACKS __attribute__((noinline, no_sanitize("address")))
#else
void BeginSwitch(void**, const void*, size_t) {}
void EndSwitch(void*, const void**, size_t*) {}
void CleanStack(void*) {}
#ifdef __clang__
#define PRECONDOR_SWITCHES_STACKS __attribute__((noinline))
#else  // noipa: g++'s callers would keep values in registers that the function itself leaves alone
#define PRECONDOR_SWITCHES_STACKS __attribute__((noipa))
#endif
#endif

enum class State { kRuns, kAtBlock, kAtWarp, kDone };

// A stack on which threads run one after the other; one that waits keeps it, and the others go on with the next.
struct Fiber {
  ucontext_t context;
  void* point[5];        // what __builtin_setjmp keeps
  bool entered = false;  // so that `point` is where to go on
  void* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  size_t thread = 0;
};

struct Thread {
  uint3 place = {};
  State state = State::kDone;
  Fiber* fiber = nullptr;
  const char* file = "";
  int line = 0;
  unsigned shuffles = 0;
};

// As a device aligns a block's dynamic shared memory.
struct alignas(32) SharedUnit {
  double at[4] = {std::nan(""), std::nan(""), std::nan(""), std::nan("")};
};

struct Block {
  void* point[5];  // RunBlock's, as are these
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> idle;
  Fiber* current = nullptr;
  const std::function<void()>* body = nullptr;
  std::vector<Thread> threads;
  std::vector<size_t> order;
  size_t started = 0;  // of those in `order`
  std::vector<unsigned char> slots;
  std::vector<SharedUnit> dynamic_shared;  // DynamicShared() of kernels/cuda/launch.h

  ~Block() {
    for (const auto& fiber : fibers) {
      CleanStack(fiber->stack);  // for who is given its place
      munmap(static_cast<char*>(fiber->stack) - kPageBytes, kPageBytes + kStackBytes);
    }
  }
};

Mutex runs;  // held while a grid runs
Block running;

unsigned ThreadNumber() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

// A function of its own: g++ keeps the place where a fiber goes on only if a call may come back to it.
[[noreturn]] PRECONDOR_SWITCHES_STACKS void Jump(void** point) { __builtin_longjmp(point, 1); }

// Until the fiber leaves. Both ways by the compiler's own setjmp, which asks nothing of the kernel and of which
// AddressSanitizer does not hear: it takes longjmp for the end of what is on the stack.
PRECONDOR_SWITCHES_STACKS void EnterFiber(Fiber& fiber) {
  running.current = &fiber;
  BeginSwitch(&running.fake_stack, fiber.stack, kStackBytes);
  if (__builtin_setjmp(running.point) == 0) {
    if (!std::exchange(fiber.entered, true)) setcontext(&fiber.context);
    Jump(fiber.point);
  }
  EndSwitch(running.fake_stack, nullptr, nullptr);
}

PRECONDOR_SWITCHES_STACKS void LeaveFiber(Fiber& fiber, bool for_good) {
  BeginSwitch(for_good ? nullptr : &fiber.fake_stack, running.stack, running.stack_bytes);
  if (__builtin_setjmp(fiber.point) == 0) Jump(running.point);
  EndSwitch(fiber.fake_stack, &running.stack, &running.stack_bytes);
}

void FiberMain() {
  EndSwitch(nullptr, &running.stack, &running.stack_bytes);
  Fiber& fiber = *running.current;
  while (running.started < running.order.size()) {
    fiber.thread = running.order[running.started++];
    Thread& thread = running.threads[fiber.thread];
    thread.state = State::kRuns;
    thread.fiber = &fiber;
    threadIdx = thread.place;
    (*running.body)();
    thread.state = State::kDone;
  }
  running.idle.push_back(&fiber);
  LeaveFiber(fiber, /*for_good=*/true);
}

void Wait(State state, const char* file, int line) {
  Fiber& fiber = *running.current;
  Thread& thread = running.threads[fiber.thread];
  thread.state = state;
  thread.file = file;
  thread.line = line;
  LeaveFiber(fiber, /*for_good=*/false);
}

[[noreturn]] void Die(const Thread& thread, const char* group) {
  std::fprintf(stderr, "%s:%d: not all threads of the %s come here: thread %u, %u of block %u, %u waits\n", thread.file,
               thread.line, group, thread.place.x, thread.place.y, blockIdx.x, blockIdx.y);
  std::abort();
}

// Lets threads [begin, end) go on when all of them wait at the same place for `state`; false when none waits for it.
bool Release(size_t begin, size_t end, State state, const char* group) {
  const auto first = running.threads.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = running.threads.begin() + static_cast<std::ptrdiff_t>(end);
  const auto waits = [state](const Thread& thread) { return thread.state == state; };
  const auto waiting = std::find_if(first, last, waits);
  if (waiting == last) return false;
  for (auto thread = first; thread != last; ++thread) {
    if (!waits(*thread) || thread->line != waiting->line) Die(*waiting, group);
  }
  for (auto thread = first; thread != last; ++thread) thread->state = State::kRuns;
  return true;
}

Fiber& IdleFiber() {
  if (running.idle.empty()) {
    Fiber& fiber = *running.fibers.emplace_back(std::make_unique<Fiber>());
    // Below it a page that nothing may write.
    void* const mapped = mmap(nullptr, kPageBytes + kStackBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    fiber.stack = static_cast<char*>(mapped) + kPageBytes;
    if (mprotect(fiber.stack, kStackBytes, PROT_READ | PROT_WRITE) != 0) std::abort();
    running.idle.push_back(&fiber);
  }
  Fiber& fiber = *running.idle.back();
  running.idle.pop_back();
  CleanStack(fiber.stack);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  fiber.entered = false;
  makecontext(&fiber.context, FiberMain, 0);
  return fiber;
}

// `turn` changes the order in which threads run: code that relies on one order is found.
void RunBlock(uint64_t turn) {
  const size_t threads = running.threads.size();
  std::iota(running.order.begin(), running.order.end(), size_t{0});
  if (turn % 3 == 1) std::reverse(running.order.begin(), running.order.end());
  if (turn % 3 == 2) {
    std::rotate(running.order.begin(), running.order.begin() + static_cast<std::ptrdiff_t>(threads / 3),
                running.order.end());
  }
  running.started = 0;
  while (running.started < threads) EnterFiber(IdleFiber());
  for (;;) {
    bool more = false;
    for (size_t begin = 0; begin < threads; begin += kLanes) {
      more |= Release(begin, std::min<size_t>(begin + kLanes, threads), State::kAtWarp, "warp");
    }
    if (!more && !Release(0, threads, State::kAtBlock, "block")) return;
    for (const size_t at : running.order) {
      Thread& thread = running.threads[at];
      if (thread.state != State::kRuns) continue;
      threadIdx = thread.place;
      EnterFiber(*thread.fiber);
    }
  }
}

}  // namespace

void WaitForBlock(const char* file, int line) { Wait(State::kAtBlock, file, line); }
void WaitForWarp(const char* file, int line) { Wait(State::kAtWarp, file, line); }
unsigned CurrentLane() { return ThreadNumber() % kLanes; }
unsigned NextShuffle() { return running.threads[ThreadNumber()].shuffles++ % 2; }
unsigned char* LaneSlot(unsigned shuffle, unsigned lane) {
  return &running.slots[size_t{8} * ((ThreadNumber() / kLanes * kLanes + lane) * 2 + shuffle)];
}

void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  MutexLock lock(runs);
  // As large as asked for, to 32 bytes, so that AddressSanitizer sees what is beyond it; filled with NaN.
  std::vector<SharedUnit>((shared_bytes + sizeof(SharedUnit) - 1) / sizeof(SharedUnit)).swap(running.dynamic_shared);
  const size_t threads = size_t{block.x} * block.y * block.z;
  running.threads.assign(threads, Thread());
  running.order.resize(threads);
  running.body = &body;
  running.slots.resize((threads + kLanes) * 16);
  for (unsigned number = 0; number < threads; ++number) {
    running.threads[number].place = {number % block.x, number / block.x % block.y, number / block.x / block.y};
  }
  blockDim = block;
  gridDim = grid;
  uint64_t turn = 0;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        RunBlock(turn++);
      }
    }
  }
}

void* DynamicSharedOfBlock() { return running.dynamic_shared.data(); }

}  // namespace precondor::cuda_host

namespace precondor::cuda {
void* DynamicShared();
void* DynamicShared() { return cuda_host::DynamicSharedOfBlock(); }
}  // namespace precondor::cuda
