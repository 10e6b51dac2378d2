// SPDX-License-Identifier: Apache-2.0
#include "precondor/methods.h"

#include "kernels/methods/registry.h"
#include "precondor/client.h"

namespace precondor {

std::vector<MethodTraits> KnownMethods() { return AllMethodTraits(); }

bool Worker::NeedsStatistics(uint64_t step, int64_t layer) const {
  const SessionSpec& spec = session().spec;
  return ModeOf(step) == Mode::kSecondOrder && IsStatisticStep(spec, step) && TakesStatistics(spec, layer);
}

bool Worker::SendsGradient(int64_t layer) const {
  const auto& [spec, rank, rollback_step] = session();
  return spec.exchange != ExchangeMode::kDelegate || DelegateRank(spec, layer) == static_cast<int32_t>(rank);
}

}  // namespace precondor
