// SPDX-License-Identifier: Apache-2.0
// The rate at which one core multiplies and adds in f32 when it does nothing else.
#pragma once

namespace precondor {

// Some tens of microseconds of fused multiply-adds with the widest vectors that this processor has; returns their FLOP.
double RunFmas();

}  // namespace precondor
