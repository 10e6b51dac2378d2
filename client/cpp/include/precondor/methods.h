// SPDX-License-Identifier: Apache-2.0
// The methods that a session can name.
#pragma once

#include <vector>

#include "kernels/base/method_traits.h"

namespace precondor {

// Those of this version, in no order that means anything. Thread-safe.
std::vector<MethodTraits> KnownMethods();

}  // namespace precondor
