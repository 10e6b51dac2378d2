// SPDX-License-Identifier: Apache-2.0
// Names of threads, by which top -H, perf and debuggers tell them apart.
#pragma once

#include <pthread.h>

namespace precondor {

// Names the calling thread. Linux takes names of up to 15 characters; longer ones have no effect.
inline void NameThisThread(const char* name) { pthread_setname_np(pthread_self(), name); }

}  // namespace precondor
