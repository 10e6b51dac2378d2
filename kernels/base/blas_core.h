// SPDX-License-Identifier: Apache-2.0
// OpenBLAS chooses its kernels by the processor's model, when it is loaded. For a model that is younger than the
// library it takes those of 2004, which are about 5 times slower, and whose sums depend on where a matrix lies.
#pragma once

#include "absl/strings/string_view.h"

namespace precondor {

struct ProcessorFeatures {
  bool avx2_fma = false;
  bool avx512 = false;  // F, BW, DQ and VL
};

// What OPENBLAS_CORETYPE should say where OpenBLAS has chosen `core`; empty: it has chosen well, or there is no better.
absl::string_view BetterBlasCore(absl::string_view core, const ProcessorFeatures& features);

// Has the process' OpenBLAS use the better ones, where there are some and the environment has no OPENBLAS_CORETYPE.
// While no other thread uses OpenBLAS: first thing in main, or where a module is loaded that has an OpenBLAS of its
// own.
void UseBestBlasCore();

}  // namespace precondor
