// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "kernels/base/blas_core.h"

int main(int argc, char** argv) {
  precondor::UseBestBlasCore();
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
