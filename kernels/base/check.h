// SPDX-License-Identifier: Apache-2.0
// Assertions for programmer errors only. Anything that a request or a device can cause is an absl::Status.
#pragma once

#include <cstdio>
#include <cstdlib>

// Aborts with file, line and condition if `condition` is false. Active in every build.
#define PRECONDOR_CHECK(condition)                                                                 \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      std::fprintf(stderr, "%s:%d: PRECONDOR_CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                                \
    }                                                                                              \
  } while (false)
