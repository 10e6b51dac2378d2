// SPDX-License-Identifier: Apache-2.0
// Names of threads, by which top -H, perf and debuggers tell them apart.
#pragma once

#include <pthread.h>

#include "kernels/base/check.h"

namespace precondor {

// Names the calling thread. Precondition: `name` has at most 15 characters, which is what Linux takes.
inline void NameThisThread(const char* name) { PRECONDOR_CHECK(pthread_setname_np(pthread_self(), name) == 0); }

}  // namespace precondor
