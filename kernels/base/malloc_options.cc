// SPDX-License-Identifier: Apache-2.0
#include "kernels/base/malloc_options.h"

#include <algorithm>
#include <malloc.h>
#include <thread>

namespace precondor {

void KeepLargeBlocks() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_ARENA_MAX, static_cast<int>(std::max(2u, std::thread::hardware_concurrency())));
}

}  // namespace precondor
