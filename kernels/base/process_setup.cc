// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/process_setup.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <malloc.h>
#include <string>
#include <thread>

// Null in a program without OpenBLAS, or with an OpenBLAS that is built for one processor.
extern "C" {
__attribute__((weak)) char* gotoblas_corename();
__attribute__((weak)) void gotoblas_dynamic_init();
__attribute__((weak)) void gotoblas_dynamic_quit();
}

namespace precondor {
namespace {

constexpr char kVariable[] = "OPENBLAS_CORETYPE";

ProcessorFeatures FeaturesOfThis() {
  ProcessorFeatures features;
#ifdef __x86_64__
  __builtin_cpu_init();
  features.avx2_fma = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  features.avx512 = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                    __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
#endif
  return features;
}

}  // namespace

absl::string_view BetterBlasCore(absl::string_view core, const ProcessorFeatures& features) {
  // OpenBLAS' fallback cores, which use no AVX.
  constexpr std::array<absl::string_view, 6> kOld = {"Prescott", "Core2", "Nehalem", "Penryn", "Katmai", "Generic"};
  if (std::find(kOld.begin(), kOld.end(), core) == kOld.end()) return "";
  if (features.avx512) return "SkylakeX";
  return features.avx2_fma ? "Haswell" : "";
}

void UseBestBlasCore() {
  if (gotoblas_corename == nullptr || gotoblas_dynamic_init == nullptr || std::getenv(kVariable) != nullptr) return;
  const std::string better(BetterBlasCore(gotoblas_corename(), FeaturesOfThis()));
  if (better.empty() || setenv(kVariable, better.c_str(), /*overwrite=*/0) != 0) return;
  gotoblas_dynamic_quit();
  gotoblas_dynamic_init();  // chooses again, now by the variable
  unsetenv(kVariable);
}

void KeepLargeBlocks() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_ARENA_MAX, static_cast<int>(std::max(2u, std::thread::hardware_concurrency())));
}

}  // namespace precondor
