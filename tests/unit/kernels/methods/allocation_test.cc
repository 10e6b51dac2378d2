// SPDX-License-Identifier: Apache-2.0
// A step whose memory has been taken once takes no more, neither from the heap nor from the system. This program's
// malloc and mmap count what the calling thread asks for while a step runs, and so does operator new. Not counted is
// what libraries take for themselves: oneDNN's sgemm has work buffers of its own at every call, and so have OpenBLAS'
// small products on some processors with AVX-512.
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <link.h>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "kernels/base/sanitizers.h"
#include "kernels/methods/registry.h"
#include "tests/support/method_driver.h"

namespace precondor {
namespace {

thread_local bool counting = false;
thread_local int64_t counted = 0;

// The addresses of oneDNN's code; empty in builds without it.
struct CodeRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

CodeRange FindOneDnn() {
  CodeRange range;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* out) {
        if (std::string(library->dlpi_name).find("libdnnl") == std::string::npos) return 0;
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const ElfW(Phdr)& part = library->dlpi_phdr[i];
          if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
          const uintptr_t begin = library->dlpi_addr + part.p_vaddr;
          *static_cast<CodeRange*>(out) = {begin, begin + part.p_memsz};
        }
        return 1;
      },
      &range);
  return range;
}

const CodeRange kOneDnn = FindOneDnn();

[[maybe_unused]] void Count(const void* caller) {
  const auto address = reinterpret_cast<uintptr_t>(caller);
  if (!counting || (address >= kOneDnn.begin && address < kOneDnn.end)) return;
  Dl_info symbol;
  const bool known = dladdr(caller, &symbol) != 0 && symbol.dli_sname != nullptr;
  if (known && std::strstr(symbol.dli_sname, "gemm_small_kernel") != nullptr) return;
  ++counted;
}

}  // namespace
}  // namespace precondor

// A sanitizer has a malloc of its own.
#if !PRECONDOR_HAS_ASAN && !PRECONDOR_HAS_TSAN
#define COUNT_CALLER() precondor::Count(__builtin_return_address(0))
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* block, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  COUNT_CALLER();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  COUNT_CALLER();
  return __libc_calloc(count, bytes);
}
void* realloc(void* block, size_t bytes) {
  COUNT_CALLER();
  return __libc_realloc(block, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  COUNT_CALLER();
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  COUNT_CALLER();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** block, size_t alignment, size_t bytes) {
  COUNT_CALLER();
  *block = __libc_memalign(alignment, bytes);
  return *block == nullptr ? ENOMEM : 0;
}
void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  COUNT_CALLER();
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}
}

[[gnu::noinline]] void* operator new(size_t bytes) {
  COUNT_CALLER();
  if (void* memory = __libc_malloc(bytes)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace precondor {
namespace {

template <typename Work>
int64_t CountDuring(const Work& work) {
  counted = 0;
  counting = true;
  work();
  counting = false;
  return counted;
}

class AllocationTest : public testing::Test {
 protected:
  void SetUp() override {
    if (PRECONDOR_HAS_ASAN || PRECONDOR_HAS_TSAN) GTEST_SKIP() << "the sanitizer's malloc cannot be counted";
  }

  // Steps of `vectors` statistic vectors a side on one layer: all of `update` and `precondition` from step `warm` on.
  void ExpectNothingTaken(const MethodConfig& config, int64_t vectors, int warm = 40) {
    const LayerSpec layer{"layer", 72, 90, true};
    const std::unique_ptr<Backend> backend = MakeTestBackend();
    const std::unique_ptr<Method> method = MakeMethod(config).value();
    const std::unique_ptr<LayerState> state = method->MakeState(layer, *backend).value();
    VectorStream a(Stream::kCorrelated, layer.d_in, 1), g(Stream::kCorrelated, layer.d_out, 2);
    reference::Vectors rows;
    for (int64_t i = 0; i < layer.d_out; ++i) rows.push_back(a.Gaussian());
    const DeviceMatrix d = ToDevice(*backend, rows);
    DeviceMatrix u = backend->Allocate(layer.d_out, layer.d_in).value();
    for (int step = 0; step < warm + 40; ++step) {
      const DeviceMatrix device_a = ToDevice(*backend, a.Next(vectors)), device_g = ToDevice(*backend, g.Next(vectors));
      absl::Status updated, answered;
      const int64_t update = CountDuring([&] {
        if (method->needs_statistics()) updated = state->Update({device_a.view(), device_g.view()});
      });
      const int64_t precondition = CountDuring([&] { answered = state->Precondition(d.view(), u.view()); });
      ASSERT_TRUE(updated.ok()) << updated;
      ASSERT_TRUE(answered.ok()) << answered;
      if (step < warm) continue;
      ASSERT_EQ(update, 0) << "update of step " << step;
      ASSERT_EQ(precondition, 0) << "precondition of step " << step;
    }
  }
};

OptionValue Text(const char* text) { return std::string(text); }

TEST_F(AllocationTest, CountsWhatTheBackendTakesOnce) {
  EXPECT_GE(CountDuring([] { std::vector<int> numbers(100); }), 1);
  const std::unique_ptr<Backend> backend = MakeTestBackend();
  for (const int64_t side : {8, 100, 700}) {  // malloc's, and of large pages
    const auto take = [&] { EXPECT_TRUE(backend->Allocate(side, side).ok()); };
    EXPECT_GE(CountDuring(take), 1) << side;
    EXPECT_EQ(CountDuring(take), 0) << side;
  }
}

// With recompressions, of which there is one every few steps. The columns that they keep vary, and with them sizes of
// scratch: it takes many steps until all have been asked for.
TEST_F(AllocationTest, MkorInLowRank) {
  for (const char* rule : {"EXACT_DAMPED", "REFERENCE", "BLEND"}) {
    for (const int64_t vectors : {1, 4, 16}) {
      for (const double rank : {16.0, 64.0}) {
        SCOPED_TRACE(testing::Message() << rule << ", " << vectors << " vectors, rank " << rank);
        ExpectNothingTaken({"mkor", {{"rule", Text(rule)}, {"representation", Text("LOW_RANK")}, {"rank", rank}}},
                           vectors, 200);
      }
    }
  }
}

TEST_F(AllocationTest, MkorInFull) {
  for (const char* rule : {"EXACT_DAMPED", "REFERENCE", "BLEND", "PUBLISHED"}) {
    for (const int64_t vectors : {1, 4, 16}) {
      SCOPED_TRACE(testing::Message() << rule << ", " << vectors << " vectors");
      ExpectNothingTaken({"mkor", {{"rule", Text(rule)}, {"representation", Text("DENSE")}}}, vectors);
    }
  }
}

// Between updates of its factors, the one at the first gradient apart.
TEST_F(AllocationTest, KronBetweenUpdates) {
  for (const char* mode : {"NONE", "ONE_DIAG"}) {
    SCOPED_TRACE(mode);
    ExpectNothingTaken(
        {"kron",
         {{"memory_save_mode", Text(mode)}, {"max_update_probability", 0.001}, {"min_update_probability", 0.001}}},
        1);
  }
}

TEST_F(AllocationTest, Eva) { ExpectNothingTaken({"eva", {}}, 16); }

TEST_F(AllocationTest, KfacBetweenDecompositions) {
  for (const char* form : {"EIGEN", "INVERSE"}) {
    ExpectNothingTaken({"kfac", {{"form", Text(form)}, {"inv_update_steps", Text("1000")}, {"stagger", false}}}, 16);
  }
  ExpectNothingTaken({"kfac", {{"prediv", true}, {"inv_update_steps", Text("1000")}, {"stagger", false}}}, 16);
}

}  // namespace
}  // namespace precondor
