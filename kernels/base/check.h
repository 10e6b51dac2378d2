// SPDX-License-Identifier: Apache-2.0
// For programmer errors only: what a request or a device can cause is an absl::Status.
#pragma once

#include <cstdio>
#include <cstdlib>

// Aborts, naming file, line and condition, when `condition` is false; in every build.
#define PRECONDOR_CHECK(condition)                                                                 \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: PRECONDOR_CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                                \
    }                                                                                              \
  } while (false)
