// SPDX-License-Identifier: Apache-2.0
// What a program sets up for its process before it starts threads: kernels of OpenBLAS, and options of malloc.
#pragma once

#include "absl/strings/string_view.h"

namespace precondor {

// OpenBLAS chooses its kernels by the processor's model when the library is loaded. For a model that is newer than the
// library it falls back to kernels of 2004, which are about 5 times slower and whose sums depend on where a matrix lies
// in memory. The functions below work around that.
struct ProcessorFeatures {
  bool avx2_fma = false;
  bool avx512 = false;  // F, BW, DQ and VL
};

// Returns the value of OPENBLAS_CORETYPE that selects faster kernels than `core`, the ones that OpenBLAS has chosen.
// Returns an empty string if OpenBLAS has chosen well or if `features` allow nothing better.
absl::string_view BetterBlasCore(absl::string_view core, const ProcessorFeatures& features);

// Switches the process' OpenBLAS to the kernels that BetterBlasCore names. Does nothing if it names none or if the
// environment sets OPENBLAS_CORETYPE. Precondition: no other thread uses OpenBLAS. Call it first in main, or when a
// module with its own copy of OpenBLAS is loaded.
void UseBestBlasCore();

// Makes malloc keep freed large blocks: returning them to the kernel costs more than copying the payloads they carry.
// It also limits the number of arenas, since each keeps its own free blocks. Call it before the process starts threads.
void KeepLargeBlocks();

}  // namespace precondor
