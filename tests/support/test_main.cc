// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "kernels/base/process_setup.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
// A name that gRPC's resolver still asks for when a test's process ends keeps a few bytes in c-ares.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares\n"; }
#endif
#endif

// Null in tests that do not link gRPC.
extern "C" __attribute__((weak)) void grpc_init();
extern "C" __attribute__((weak)) void grpc_shutdown_blocking();

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  testing::InitGoogleMock(&argc, argv);
  // gRPC shuts down in a thread of its own after its last use, and LeakSanitizer would find what that has not yet
  // freed.
  if (grpc_init != nullptr) grpc_init();
  const int result = RUN_ALL_TESTS();
  if (grpc_shutdown_blocking != nullptr) grpc_shutdown_blocking();
  return result;
}
