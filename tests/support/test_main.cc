// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "kernels/base/blas_core.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
// A name that gRPC's resolver still asks for when a test's process ends keeps a few bytes in c-ares.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares\n"; }
#endif
#endif

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
