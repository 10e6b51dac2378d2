// SPDX-License-Identifier: Apache-2.0
// The backend that a suite runs on. Programs get the CPU's, unless they bring a MakeTestBackend of their own
// (test_backend_cuda.cc): so one text of a suite tests every backend.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace precondor {

std::unique_ptr<Backend> MakeTestBackend();

}  // namespace precondor
