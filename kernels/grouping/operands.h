// SPDX-License-Identifier: Apache-2.0
// Which operations may change places.
#pragma once

#include "kernels/operation.h"

namespace precondor {

// Whether neither changes what the other reads or writes. False where the memory alone does not show it.
bool AreIndependent(const Operation& one, const Operation& other);

}  // namespace precondor
