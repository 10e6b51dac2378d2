// SPDX-License-Identifier: Apache-2.0
#include "precondor/methods.h"

#include "kernels/methods/registry.h"
#include "precondor/client.h"

namespace precondor {

std::vector<MethodTraits> KnownMethods() { return AllMethodTraits(); }

bool Worker::NeedsStatistics(uint64_t step, int64_t layer) const {
  return NeedsStatistics(step) && TakesStatistics(spec(), layer);
}

}  // namespace precondor
