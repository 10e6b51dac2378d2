// SPDX-License-Identifier: Apache-2.0
#include "kernels/methods/muon_config.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/status_macros.h"

namespace precondor {

double MuonConfig::ScaleOf(const LayerSpec& layer) const {
  const auto d_out = static_cast<double>(layer.d_out), d_in = static_cast<double>(layer.d_in);
  if (scale == MuonScale::kOriginal) return std::sqrt(std::max(1.0, d_out / d_in));
  return 0.2 * std::sqrt(std::max(d_out, d_in));
}

absl::StatusOr<MuonConfig> ParseMuonConfig(const MethodConfig& config) {
  OptionReader reader(config);
  MuonConfig out = ReadMuonConfig(reader);
  PRECONDOR_RETURN_IF_ERROR(reader.Finish());
  return out;
}

}  // namespace precondor
