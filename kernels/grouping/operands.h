// SPDX-License-Identifier: Apache-2.0
// Tells which operations may be reordered.
#pragma once

#include "kernels/operation.h"

namespace precondor {

// Returns whether neither operation writes memory that the other reads or writes. Returns false if the operands'
// addresses do not show it.
bool AreIndependent(const Operation& one, const Operation& other);

}  // namespace precondor
