// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "kernels/base/process_setup.h"
#include "tests/support/wait_until.h"

// Null in tests that do not link gRPC.
extern "C" __attribute__((weak)) void grpc_init();
extern "C" __attribute__((weak)) void grpc_shutdown_blocking();
extern "C" __attribute__((weak)) int grpc_is_initialized();

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  testing::InitGoogleMock(&argc, argv);
  if (grpc_init == nullptr) return RUN_ALL_TESTS();
  grpc_init();
  const int result = RUN_ALL_TESTS();
  grpc_shutdown_blocking();
  // A connection that is being made holds gRPC longer and ends it in a thread of its own. LeakSanitizer
  // would find what gRPC's threads have not yet freed.
  precondor::WaitUntil([] { return grpc_is_initialized() == 0; });
  return result;
}
