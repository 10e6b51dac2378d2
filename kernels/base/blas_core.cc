// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/blas_core.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <unistd.h>

// Null in a program without OpenBLAS.
extern "C" __attribute__((weak)) char* openblas_get_corename();

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
  // OpenBLAS' cores without AVX that it falls back to.
  constexpr std::array<absl::string_view, 6> kOld = {"Prescott", "Core2", "Nehalem", "Penryn", "Katmai", "Generic"};
  if (std::find(kOld.begin(), kOld.end(), core) == kOld.end()) return "";
  if (features.avx512) return "SkylakeX";
  return features.avx2_fma ? "Haswell" : "";
}

void UseBestBlasCore(char** argv) {
  if (openblas_get_corename == nullptr || std::getenv(kVariable) != nullptr) return;
  const std::string better(BetterBlasCore(openblas_get_corename(), FeaturesOfThis()));
  if (better.empty() || setenv(kVariable, better.c_str(), /*overwrite=*/0) != 0) return;
  execv("/proc/self/exe", argv);
  // Where that is forbidden the program goes on with the kernels that it has.
}

}  // namespace precondor
