// SPDX-License-Identifier: Apache-2.0
// Lists the methods that a session can name.
#pragma once

#include <vector>

#include "kernels/base/method_traits.h"

namespace precondor {

// Returns the methods of this version, in no particular order. Thread-safe.
std::vector<MethodTraits> KnownMethods();

}  // namespace precondor
