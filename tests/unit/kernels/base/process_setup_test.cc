// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/process_setup.h"

#include <gtest/gtest.h>

namespace precondor {
namespace {

TEST(BlasCoreTest, ReplacesAFallbackAlone) {
  const ProcessorFeatures none, avx2 = {.avx2_fma = true}, all = {.avx2_fma = true, .avx512 = true};
  EXPECT_EQ(BetterBlasCore("Prescott", all), "SkylakeX");
  EXPECT_EQ(BetterBlasCore("Prescott", avx2), "Haswell");
  EXPECT_EQ(BetterBlasCore("Prescott", none), "");
  for (const char* core : {"SkylakeX", "Haswell", "Zen", "Cooperlake", "Sapphirerapids", "neoversen1"}) {
    EXPECT_EQ(BetterBlasCore(core, all), "") << core;
  }
}

}  // namespace
}  // namespace precondor
